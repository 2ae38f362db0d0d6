"""A run's directory: its lock, and the files that an earlier run left in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from normplug._report.arms import BASELINE
from normplug._report.files import write_file
from normplug._report.measure import Measure
from normplug._report.run_files import METRICS, RESULT, VARIANCE
from normplug.experiment.errors import PLACE, WHO, UserError, unwritable

CONFIG = "config.yaml"
LOCK = ".lock"
FORMER = "former"
BEFORE_A_RUN = {".hydra", "train.log", LOCK}  # written before a run starts
# What a run writes besides its result and its configuration.
PRODUCTS = (
    METRICS,
    f"{METRICS}.kept",
    VARIANCE,
    "variance.png",
    "checkpoints",
    "tensorboard",
)
PROBE_BYTES = 2**16  # more than a run writes before it trains
WAY_OUT = "Name this one: study=NAME (a directory of its own) or tag=NAME (an arm of its own)."


class RunDirectory:
    """The directory of one live run.

    The owner locks a file in it. The lock is the operating system's, so a process that is killed
    releases it. The processes of one distributed run share the lock of rank 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(str(path / LOCK), timeout=0)

    def take(self) -> None:
        """Lock the directory until `release` or the end of the process.

        Raises:
            UserError: a live process owns the directory.
            OSError: the lock file cannot be written.
        """
        if not is_first_process():
            return
        try:
            self._lock.acquire()
        except Timeout:
            raise UserError(
                f"{WHO}: {self.path} belongs to a run that is still running{self._owner()}. Wait "
                f"until it ends, or give this run its own directory: {PLACE}."
            ) from None

    def release(self) -> None:
        """Unlock the directory."""
        self._lock.release()

    def result(self) -> dict[str, Any]:
        """Return the content of `result.json`; {} if there is no such file.

        Raises:
            UserError: the file is damaged.
        """
        path = self.path / RESULT
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(result, dict):
                return result
            why = "it is not a JSON object"
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            why = str(error)
        raise UserError(f"{WHO}: {path} cannot be read: {why}. Delete it to train this run again.")

    def finished_result(self, cfg: DictConfig) -> dict[str, Any] | None:
        """Return the result of this same run if it has finished here before, else None.

        Raises:
            UserError: another run has finished here, or the finished run's files are damaged.
        """
        result = self.result()
        if result.get("status") != "finished":
            return None
        measure = Measure.of(result)
        if measure.test_key not in result:
            raise UserError(
                f"{WHO}: {self.path} holds a finished run without a test {measure.name}. Delete "
                f"its result.json to train it again. {WAY_OUT}"
            )
        try:
            changed = self._changed(cfg)
        except Exception as error:  # from the disk, YAML or OmegaConf
            raise UserError(
                f"{WHO}: {self.path} holds a finished run whose config.yaml cannot be read "
                f"({' '.join(str(error).split())}), so it may be another run. {WAY_OUT}"
            ) from None
        if changed:
            raise UserError(
                f"{WHO}: {self.path} holds a finished run with another value of "
                f"{', '.join(changed[:5])}. {WAY_OUT}"
            )
        return result

    def was_cut_short(self, cfg: DictConfig) -> bool:
        """Whether this same run was interrupted or killed here before."""
        if self.result().get("status") not in ("running", "interrupted"):
            return False
        with contextlib.suppress(Exception):  # config.yaml is missing or damaged
            return not set(self._changed(cfg)) - {"ckpt_path"}
        return False

    def set_aside(self, checkpoint: Path | None) -> None:
        """Move the files of an unfinished run to `former/`, and print a message.

        An older `former/` is deleted. If `checkpoint` is in this directory, the files stay, since
        the run that resumes from it continues them.
        """
        left = [self.path / name for name in PRODUCTS if (self.path / name).exists()]
        if not left or not is_first_process():
            return
        if checkpoint and self.path.resolve() in checkpoint.resolve().parents:
            return
        former = self.path / FORMER
        shutil.rmtree(former, ignore_errors=True)
        former.mkdir()
        for path in left:
            path.replace(former / path.name)
        print(f"set aside: {former} has the files of a run that did not finish", file=sys.stderr)

    def remove_traces(self) -> None:
        """Remove the directory of a refused run, if only Hydra's files and the lock are in it."""
        if is_first_process() and {p.name for p in self.path.iterdir()} <= BEFORE_A_RUN:
            shutil.rmtree(self.path, ignore_errors=True)

    def write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        if is_first_process():
            write_file(self.path / name, text)

    def _changed(self, cfg: DictConfig) -> list[str]:
        """Return the keys whose values differ between the earlier run's configuration and `cfg`."""
        done = _flat(OmegaConf.to_container(OmegaConf.load(self.path / CONFIG)))
        asked = _flat(OmegaConf.to_container(cfg, resolve=True))
        keys = sorted(k for k in done.keys() | asked.keys() if done.get(k) != asked.get(k))
        return [k for k in keys if cfg.mode != BASELINE or not k.startswith("swap.")]

    def _owner(self) -> str:
        """Name the process that owns the directory, if `result.json` records it."""
        try:
            result = self.result()
        except UserError:
            return ""
        process = result.get("process")
        return f" (process {process}, since {result.get('date')})" if process else ""


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def is_first_process() -> bool:
    """Whether this is rank 0 of a distributed run, or the only process."""
    return getattr(rank_zero_only, "rank", 0) == 0


def this_process() -> str:
    """Name this process, for `result.json`."""
    return f"{os.getpid()} on {socket.gethostname()}"


def probe(path: Path) -> None:
    """Check that the directory `path` can be written or created; leave no trace.

    Raises:
        UserError: the disk is full or read-only, or `path` cannot be a directory.
    """
    path = path.absolute()
    try:
        nearest = next(place for place in (path, *path.parents) if place.exists())
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        raise UserError(unwritable(path, error)) from None
