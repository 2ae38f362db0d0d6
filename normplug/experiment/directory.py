"""Who owns a run's directory: its name, its lock, and what a former run left in it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_only

from normplug.experiment.checks import WHO, UserError

RESULT = "result.json"
LOCK = ".lock"
FORMER = "former"
BEFORE_A_RUN = {".hydra", "train.log", LOCK}
# What a run writes besides its result and its configuration.
PRODUCTS = (
    "metrics.csv",
    "metrics.csv.kept",
    "variance.csv",
    "variance.png",
    "checkpoints",
    "tensorboard",
)
LONGEST_NAME = 180  # bytes; file systems take 255
PROBE_BYTES = 2**16  # more than a run writes before it trains
PLACE = "hydra.run.dir=DIR, or study=NAME for a sweep"


class RunDirectory:
    """The directory of one live run.

    An operating system's lock on a file in it says that its owner lives, so a process that is
    killed frees it. The processes of one distributed run share the lock of rank 0.

    Args:
        path: the directory; it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(str(path / LOCK), timeout=0)

    def take(self) -> None:
        """Own the directory until `release` or the end of the process.

        Raises:
            UserError: a live process owns it.
            OSError: it cannot be written.
        """
        if not is_first_process():
            return
        try:
            self._lock.acquire()
        except Timeout:
            raise UserError(
                f"{WHO}: {self.path} belongs to a run that is still going on{self._owner()}. Wait "
                f"for its end, or give this run a directory of its own: {PLACE}."
            ) from None

    def release(self) -> None:
        """Let others take the directory."""
        self._lock.release()

    def result(self) -> dict[str, Any]:
        """What `result.json` holds; {} where there is none.

        Raises:
            UserError: it is damaged.
        """
        path = self.path / RESULT
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            why = str(error)
        else:
            if isinstance(result, dict):
                return result
            why = "it holds no JSON object"
        raise UserError(f"{WHO}: {path} cannot be read: {why}. Delete it to train this run again.")

    def set_aside(self, checkpoint: Path | None) -> None:
        """Move what a run that did not finish left here to `former/`, and say so.

        An older `former/` is deleted. A run that resumes from a checkpoint in the directory goes on
        with its files, so they stay.
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
        """Remove the directory of a run that was refused, if only Hydra and the lock are in it."""
        if is_first_process() and {p.name for p in self.path.iterdir()} <= BEFORE_A_RUN:
            shutil.rmtree(self.path, ignore_errors=True)

    def write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        if not is_first_process():
            return
        part = self.path / f"{name}.part"
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(self.path / name)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _owner(self) -> str:
        """Which process, where it says so."""
        try:
            result = self.result()
        except UserError:
            return ""
        process = result.get("process")
        return f" (process {process}, since {result.get('date')})" if process else ""


def is_first_process() -> bool:
    """Whether this is rank 0 of a distributed run, or the only process."""
    return getattr(rank_zero_only, "rank", 0) == 0


def this_process() -> str:
    """How `result.json` names the process that writes it."""
    return f"{os.getpid()} on {socket.gethostname()}"


def unwritable(path: Path, error: OSError) -> str:
    """The sentence for a directory that cannot be written."""
    return (
        f"{WHO}: {path} cannot be written: {error.strerror or error}. Free or unlock the disk, or "
        f"give another place: {PLACE}."
    )


def probe(path: Path) -> None:
    """Write a little, without a trace, where the directory `path` is or will be.

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


def path_name(text: Any) -> str:
    """Turn any text into the name of a file or directory.

    Letters, digits and `._+-` stay; everything else becomes `_`, since slashes leave the directory
    and `=` breaks Lightning's command for the processes of a distributed run. A long name is cut
    and ends in a hash of the whole.
    """
    name = re.sub(r"[^\w.+-]+", "_", str(text)).strip("_")
    if name.startswith("."):
        name = f"_{name}"
    if len(name.encode()) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name.encode()[: LONGEST_NAME - 9].decode(errors='ignore')}_{digest}"
    return name or "_"
