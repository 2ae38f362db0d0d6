"""What Hydra calls around a run or a sweep: check the disk first, compare the arms at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from normplug.compare.__main__ import main
from normplug.compare.gather import REFUSAL
from normplug.experiment.checks import WHO, UserError
from normplug.experiment.directory import is_first_process, probe


class CheckDisk(Callback):
    """End in a sentence where the directory cannot be written, before Hydra itself writes to it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the directory of a single run."""
        _check_disk(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the directory of a sweep."""
        _check_disk(config, "hydra.sweep.dir")


class CompareArms(Callback):
    """Run `python -m normplug.compare` on the sweep's directory."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table; exit with an error where a run did not finish."""
        if not is_first_process():
            return
        root = Path(config.hydra.sweep.dir)
        code = main([str(root)])
        for refusal in root.rglob(REFUSAL):  # they were of this sweep; the results stay good
            refusal.unlink()
        if code:
            sys.exit(code)


def _check_disk(config: DictConfig, key: str) -> None:
    own = HydraConfig.instance()
    before = own.cfg
    try:
        own.set_config(config)  # the names of directories are made from it
        probe(Path(_value(config, key)))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    finally:
        own.cfg = before


def _value(config: DictConfig, key: str) -> str:
    node: Any = config
    try:
        for part in key.split("."):
            node = node[part]
    except OmegaConfBaseException as error:
        raise UserError(f"{WHO}: {key} has no value: {str(error).splitlines()[0]}.") from None
    return str(node)
