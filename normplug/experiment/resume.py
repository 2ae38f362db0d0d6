"""A run's directory, and how its files are written.

A directory belongs to train.py if its `result.json` is one of a run. Nothing else is moved, and
nothing is removed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from normplug._results import replace_file, write_file
from normplug.experiment.errors import PLACE, WHO, UserError
from normplug.experiment.measure import BASELINE, METRICS, RESULT, VARIANCE

CONFIG = "config.yaml"
LOCK = ".lock"
FORMER = "former"
LAST = Path("checkpoints", "last.ckpt")  # in a run's directory
# What a run writes besides its result.
PRODUCTS = (METRICS, VARIANCE, "variance.png", "checkpoints", "tensorboard", CONFIG)


def is_first_process() -> bool:
    """Whether this is rank 0 of a distributed run, or the only process."""
    return getattr(rank_zero_only, "rank", 0) == 0


class RunDirectory:
    """The directory of one live run.

    The owner locks a file in it. The lock is the operating system's, so a process that is killed
    releases it. The processes of one distributed run share the lock of rank 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = FileLock(str(path / LOCK), timeout=0)

    def take(self) -> None:
        """Lock the directory until `lock.release()` or the end of the process.

        Raises:
            UserError: a live process owns the directory.
            OSError: the lock file cannot be written.
        """
        if not is_first_process():
            return
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
            result = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(result, dict) and "status" in result:
                return result
            why = "it is not the result of a run"
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            why = str(error)
        raise UserError(
            f"{WHO}: {path} cannot be read: {why}. Move it away, or choose another directory: "
            f"{PLACE}."
        )

    def finished_result(self, cfg: DictConfig) -> dict[str, Any] | None:
        """Return the result of this same run if it has finished here before, else None.

        Raises:
            UserError: another run has finished here, or the finished run's files are damaged.
        """
        result = self.result()
        if result.get("status") != "finished":
            return None
        if changed := self._changed(cfg):
            raise UserError(
                f"{WHO}: {self.path} holds a finished run whose {CONFIG} is another or damaged "
                f"({', '.join(changed[:5])}). Name this one: study=NAME (a directory of its own) "
                "or tag=NAME (an arm of its own)."
            )
        return result

    def make_room(self, cfg: DictConfig) -> Path | None:
        """Return the checkpoint that the run goes on from, or None.

        It is the last one of this same run, if that was interrupted or killed here, unless
        `ckpt_path` is another of this directory; else `ckpt_path`. What the run would overwrite is
        moved to `former/1`, `former/2`, ...: the files of another unfinished run, or the metrics of
        the run that is continued.

        Raises:
            UserError: there is no such checkpoint, or the directory has files of these names that
                no run left there.
        """
        left = [name for name in PRODUCTS if (self.path / name).exists()]
        status = self.result().get("status")
        if left and status is None and is_first_process():
            raise UserError(
                f"{WHO}: {self.path} has {', '.join(left)}, but no {RESULT} of a run, so they "
                f"stay as they are. Choose another directory: {PLACE}."
            )
        checkpoint, last = self._given(cfg.ckpt_path), self.path / LAST
        continues = checkpoint and checkpoint.resolve().parent.parent == self.path.resolve()
        cut_short = status in ("running", "interrupted") and last.is_file()
        if not continues and cut_short and not self._changed(cfg):
            checkpoint = continues = last
        moves = [name for name in left if name == METRICS or not continues]
        if moves and is_first_process():
            numbers = (int(p.name) for p in self.path.glob(f"{FORMER}/*") if p.name.isdecimal())
            aside = self.path / FORMER / str(1 + max(numbers, default=0))
            aside.mkdir(parents=True)
            for name in moves:
                (self.path / name).replace(aside / name)
            print(f"set aside: {aside} has the files of an earlier run", file=sys.stderr)
        return checkpoint

    def write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        if is_first_process():
            write_file(self.path / name, text)

    def _changed(self, cfg: DictConfig) -> list[str]:
        """Return the keys whose values differ in `config.yaml`, or its name if it is damaged.

        Interpolations are compared as they are written, so the output directory does not count. Nor
        do the checkpoint that a run resumes from, and in the baseline the options of `swap`.
        """
        try:
            done: Any = OmegaConf.to_container(OmegaConf.load(self.path / CONFIG))
            asked: Any = OmegaConf.to_container(cfg)
            keys = {*done, *asked} - {"ckpt_path", "swap" if cfg.mode == BASELINE else "ckpt_path"}
            return sorted(key for key in keys if done.get(key) != asked.get(key))
        except Exception:  # from the disk, YAML or OmegaConf
            return [CONFIG]

    def _given(self, ckpt_path: str | None) -> Path | None:
        """Return the path of the checkpoint; "last" is of the run here, else beside it."""
        if ckpt_path is None:
            return None
        path = Path(ckpt_path)
        if ckpt_path == "last":
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

    A kill or a full disk during the write leaves the file that was there.
    """
    try:
        with replace_file(path) as part, part.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:  # what torch makes of a full disk
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


class Checkpoints(TorchCheckpointIO):
    """Write checkpoints by `save`, and read no code: Lightning may do either in another way."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`; Lightning itself uses the system's temporary directory."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            save(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read `path` on the host; only tensors and plain values are accepted."""
        return torch.load(path, map_location="cpu", weights_only=True)
