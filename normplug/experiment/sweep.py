"""What a Hydra multirun does when its last run is over: compare the arms."""

from __future__ import annotations

import sys
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from normplug.compare.__main__ import main


class CompareArms(Callback):
    """Run `python -m normplug.compare` on the sweep's directory."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table; exit with an error where a run did not finish."""
        if code := main([str(config.hydra.sweep.dir)]):
            sys.exit(code)
