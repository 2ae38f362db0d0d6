"""The command line of train.py, and the comparison after a sweep."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from normplug.experiment.errors import user_sentence

# The packed copy of a wheel, or the directory of a checkout.
PACKED, CHECKOUT = (Path(__file__).with_name("configs"), Path(__file__).parents[2] / "configs")
CONFIGS = str(PACKED if PACKED.is_dir() else CHECKOUT)
SHOWS_ALL = "HYDRA_FULL_ERROR" in os.environ  # Hydra's setting for whole tracebacks


def command(application: Callable[[], Any]) -> Callable[[], Any]:
    """Decorate a Hydra application: a mistake in its command line gives one sentence.

    The command line also accepts `GROUP=null` for Hydra's `GROUP=[]`. With `data=text` and no
    model, it selects a language model.
    """

    @functools.wraps(application)
    def wrapper() -> Any:
        groups = {path.name for path in Path(CONFIGS).iterdir() if path.is_dir()}
        given = [text.partition("=") for text in sys.argv[1:]]
        if "data=text" in sys.argv and not {"model", "experiment"} & {key for key, *_ in given}:
            given.append(("model", "=", "gpt_tiny"))
        sys.argv[1:] = [
            f"{key}=[]" if key in groups and value == "null" else f"{key}{sign}{value}"
            for key, sign, value in given
        ]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print
        try:
            return application()
        except Exception as error:
            sentence = user_sentence(error)
            if sentence is None or SHOWS_ALL:
                raise
            print(sentence, file=sys.stderr)
            sys.exit(1)

    return wrapper


def is_sweep() -> bool:
    """Whether this run is part of a sweep (`-m`)."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


class CompareArms(Callback):
    """Compare the arms of a sweep when it ends."""

    @rank_zero_only
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table; exit with the comparison's code if a run has not finished."""
        from normplug.experiment.compare import main  # which training need not import

        if code := main([str(config.hydra.sweep.dir)]):
            sys.exit(code)
