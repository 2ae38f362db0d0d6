"""A run's directory, and how its files are written. Nothing in it is ever removed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from normplug._results import replace_file, write_file
from normplug.experiment.errors import PLACE, WHO, UserError
from normplug.experiment.measure import METRICS, RESULT, VARIANCE

CONFIG = "config.yaml"
LOCK = ".lock"
FORMER = "former"
LAST = Path("checkpoints", "last.ckpt")  # in a run's directory
# What a run writes besides its result.
PRODUCTS = (METRICS, VARIANCE, "variance.png", "checkpoints", "tensorboard", CONFIG)


class RunDirectory:
    """The directory of one live run.

    The owner locks a file in it. The lock is the operating system's, so a process that is killed
    releases it. The processes of one distributed run share the lock of rank 0.

    Args:
        path: the directory.
        cfg: the run's configuration.
    """

    def __init__(self, path: Path, cfg: DictConfig) -> None:
        self.path = path
        self.cfg = cfg
        self.lock = FileLock(str(path / LOCK), timeout=0)

    @rank_zero_only
    def take(self) -> None:
        """Lock the directory until `lock.release()` or the end of the process.

        Raises:
            UserError: a live process owns the directory.
            OSError: the lock file cannot be written.
        """
        try:
            self.lock.acquire()
        except Timeout:
            owner = self.result()
            who = f"process {owner.get('process')}, since {owner.get('date')}"
            raise UserError(
                f"{WHO}: {self.path} belongs to a run that is still running ({who}). Wait "
                f"until it ends, or give this run its own directory: {PLACE}."
            ) from None

    def result(self) -> dict[str, Any]:
        """Return the content of `result.json`; {} if there is no such file.

        Raises:
            UserError: the file is damaged, or is not a run's.
        """
        path = self.path / RESULT
        try:
            result = json.loads(path.read_bytes()) if path.exists() else {}
            if not isinstance(result, dict) or (result and "status" not in result):
                raise ValueError("it is not the result of a run")
        except ValueError as error:
            raise UserError(
                f"{WHO}: {path} cannot be read: {error}. Move it away, or choose another "
                f"directory: {PLACE}."
            ) from None
        return result

    def finished_result(self) -> dict[str, Any] | None:
        """Return the result of this same run if it has finished here before, else None.

        Raises:
            UserError: another run has finished here.
        """
        result = self.result()
        if result.get("status") != "finished":
            return None
        if not self._has_same_config():
            raise UserError(
                f"{WHO}: {self.path} holds a finished run with another {CONFIG}. Name this one: "
                "study=NAME (a directory of its own) or tag=NAME (an arm of its own)."
            )
        return result

    def make_room(self) -> Path | None:
        """Return the checkpoint that the run resumes from or tests, or None.

        If this same run was interrupted or killed here, it is that run's last one, unless
        `ckpt_path` names another of this directory. Otherwise it is `ckpt_path`. What the run would
        overwrite is moved to `former/1`, `former/2`, ...: the files of another run, or the metrics
        of the run that is resumed.

        Raises:
            UserError: the checkpoint is missing, or the directory has files that a run writes, but
                no `result.json`.
        """
        left = [name for name in PRODUCTS if (self.path / name).exists()]
        if left and not self.result() and getattr(rank_zero_only, "rank", 0) == 0:
            raise UserError(
                f"{WHO}: {self.path} has {', '.join(left)}, but no {RESULT} of a run, so they "
                f"stay as they are. Choose another directory: {PLACE}."
            )
        checkpoint, last = self._given(), self.path / LAST
        continues = checkpoint and checkpoint.resolve().parent.parent == self.path.resolve()
        cut_short = self.result().get("status") in ("running", "interrupted") and last.is_file()
        if not continues and cut_short and self._has_same_config():
            checkpoint = continues = last
        self._set_aside([METRICS] if continues else PRODUCTS)
        self.write(CONFIG, self._config())
        return checkpoint

    @rank_zero_only
    def _set_aside(self, names: Sequence[str]) -> None:
        moves = [name for name in names if (self.path / name).exists()]
        if not moves:
            return
        numbers = (int(p.name) for p in self.path.glob(f"{FORMER}/*") if p.name.isdecimal())
        aside = self.path / FORMER / str(1 + max(numbers, default=0))
        aside.mkdir(parents=True)
        for name in moves:
            (self.path / name).replace(aside / name)
        print(f"set aside: {aside} has the files of an earlier run", file=sys.stderr)

    @rank_zero_only
    def write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        write_file(self.path / name, text)

    def _config(self) -> str:
        """The configuration as text, without the checkpoint that a run resumes from.

        Interpolations stay unresolved, so it does not depend on the output directory.
        """
        kept = self.cfg.copy()
        kept.ckpt_path = None
        return OmegaConf.to_yaml(kept)

    def _has_same_config(self) -> bool:
        path = self.path / CONFIG
        return path.is_file() and path.read_bytes() == self._config().encode()

    def _given(self) -> Path | None:
        """Return the path in `ckpt_path`; "last" is the last one here, or the newest beside."""
        if self.cfg.ckpt_path is None:
            return None
        path = Path(self.cfg.ckpt_path)
        if self.cfg.ckpt_path == "last":
            own, beside = self.path / LAST, self.path.parent.glob(f"*/{LAST}")
            found = [own] if own.is_file() else beside
            path = max(found, key=lambda path: path.stat().st_mtime, default=path)
        if not path.is_file():
            raise UserError(
                f"{WHO}: ckpt_path must be a checkpoint file; got {path}. A run's checkpoint is "
                f"{LAST} in its directory; ckpt_path=last looks in {self.path.parent}/*/."
            )
        return path


def save(content: Any, path: Path) -> None:
    """`torch.save` to a temporary file beside `path`, which is then renamed.

    A kill or a full disk during the write leaves the file that was there. Lightning itself would
    use the system's temporary directory.
    """
    with replace_file(path) as part, part.open("wb") as file:
        torch.save(content, file)


class Checkpoints(TorchCheckpointIO):
    """Write checkpoints by `save`; load only tensors and plain values."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`."""
        save(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read `path` on the host."""
        return torch.load(path, map_location="cpu", weights_only=True)
