"""Hydra callbacks: check the disk before a run or a sweep, compare the arms after a sweep."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from normplug._report.run_files import REFUSAL
from normplug.experiment.directory import is_first_process, probe
from normplug.experiment.errors import WHO, UserError


class CheckDisk(Callback):
    """Refuse a directory that cannot be written, before Hydra itself writes to it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the directory of a single run."""
        _check_disk(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the directory of a sweep."""
        _check_disk(config, "hydra.sweep.dir")


class CompareArms(Callback):
    """Compare the arms of a sweep when it ends.

    Args:
        compare: main function of the comparison: command-line arguments -> exit code. The
            configuration names it, so that training does not import it.
    """

    def __init__(self, compare: Callable[[list[str]], int]) -> None:
        self.compare = compare

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table; exit with the comparison's code if a run has not finished."""
        if not is_first_process():
            return
        root = Path(config.hydra.sweep.dir)
        code = self.compare([str(root)])
        for refusal in root.rglob(REFUSAL):  # of this sweep; the results beside them stay valid
            refusal.unlink()
        if code:
            sys.exit(code)


def _check_disk(config: DictConfig, key: str) -> None:
    hydra = HydraConfig.instance()
    before = hydra.cfg
    try:
        hydra.set_config(config)  # the resolvers in directory names read it
        probe(Path(OmegaConf.select(config, key)))
        return
    except OmegaConfBaseException as error:
        sentence = f"{WHO}: {key} has no value: {str(error).splitlines()[0]}."
    except UserError as error:
        sentence = str(error)
    finally:
        hydra.cfg = before
    print(sentence, file=sys.stderr)
    sys.exit(1)
