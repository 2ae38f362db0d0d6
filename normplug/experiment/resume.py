"""A run's directory, and the checkpoint that a run goes on from.

A directory belongs to train.py if its `result.json` is one of a run. Nothing else is moved, and
nothing is removed.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from normplug._results import replace_file, write_file
from normplug.experiment.config import probe_optimizer
from normplug.experiment.errors import PLACE, WHO, UserError, one_line
from normplug.experiment.measure import BASELINE, METRICS, RESULT, VARIANCE

CONFIG = "config.yaml"
LOCK = ".lock"
FORMER = "former"
LAST = Path("checkpoints", "last.ckpt")  # in a run's directory
# What a run writes besides its result.
PRODUCTS = (METRICS, VARIANCE, "variance.png", "checkpoints", "tensorboard", CONFIG)
WAY_OUT = "Name this one: study=NAME (a directory of its own) or tag=NAME (an arm of its own)."
KINDS = {  # of the parts of a checkpoint
    "state_dict": dict, "optimizer_states": list, "loops": dict, "epoch": int, "global_step": int,
    "run": dict,
}  # fmt: skip


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
            owner = self.result()
            who = f"process {owner.get('process')}, since {owner.get('date')}"
            raise UserError(
                f"{WHO}: {self.path} belongs to a run that is still running ({who}). Wait "
                f"until it ends, or give this run its own directory: {PLACE}."
            ) from None

    def release(self) -> None:
        """Unlock the directory."""
        self._lock.release()

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
        try:
            changed = _changed(self.path / CONFIG, cfg)
            what = f"with another value of {', '.join(changed[:5])}"
        except Exception as error:  # from the disk, YAML or OmegaConf
            changed, what = [CONFIG], f"whose {CONFIG} cannot be read ({one_line(error)})"
        if changed:
            raise UserError(f"{WHO}: {self.path} holds a finished run {what}. {WAY_OUT}")
        return result

    def make_room(self, cfg: DictConfig, given: Path | None) -> Path | None:
        """Return the last checkpoint of this same run, if it was interrupted or killed here.

        The files of another unfinished run are moved to `former/1`, `former/2`, ..., which are
        searched for a checkpoint too. They stay if the checkpoint that the command gives is one of
        them: this run continues that one.

        Raises:
            UserError: the directory has files of these names that no run left there.
        """
        left = [self.path / name for name in PRODUCTS if (self.path / name).exists()]
        status = self.result().get("status")
        if left and status is None and is_first_process():
            raise UserError(
                f"{WHO}: {self.path} has {', '.join(path.name for path in left)}, but no "
                f"{RESULT} of a run, so they stay as they are. Choose another directory: {PLACE}."
            )
        if given and self.path.resolve() in given.resolve().parents:
            return given
        cut_short = status in ("running", "interrupted") and _is_same(self.path / CONFIG, cfg)
        if cut_short and (last := self.path / LAST).is_file():
            return last
        number = 1 + len(list((self.path / FORMER).glob("[0-9]*")))
        if left and is_first_process():
            aside = self.path / FORMER / str(number)
            aside.mkdir(parents=True)
            for path in left:
                path.replace(aside / path.name)
            print(f"set aside: {aside} has the files of an earlier run", file=sys.stderr)
        for older in range(number - 1, 0, -1):
            place = self.path / FORMER / str(older)
            if _is_same(place / CONFIG, cfg) and (place / LAST).is_file():
                return place / LAST
        return given

    def write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        if is_first_process():
            write_file(self.path / name, text)


def _is_same(config: Path, cfg: DictConfig) -> bool:
    try:
        return not _changed(config, cfg)
    except Exception:  # config.yaml is missing or damaged
        return False


def _changed(config: Path, cfg: DictConfig) -> list[str]:
    """Return the keys whose values differ between an earlier run's configuration and `cfg`.

    Interpolations are compared as they are written. So the output directory does not count, nor
    does the checkpoint that a run resumes from.
    """
    done = _flat(OmegaConf.to_container(OmegaConf.load(config)))
    asked = _flat(OmegaConf.to_container(cfg))
    ignored = ("ckpt_path", "swap.") if cfg.mode == BASELINE else ("ckpt_path",)
    keys = sorted(k for k in done.keys() | asked.keys() if done.get(k) != asked.get(k))
    return [key for key in keys if not key.startswith(ignored)]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def save(content: Any, path: Path) -> None:
    """`torch.save` to a temporary file beside `path`, which is then renamed.

    A kill or a full disk during the write leaves the file that was there.
    """
    try:
        with replace_file(path) as part, part.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:  # what torch makes of a full disk
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


class AtomicCheckpoints(TorchCheckpointIO):
    """Write checkpoints by `save`; Lightning itself writes to the system's temporary directory."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            save(checkpoint, Path(path))


def find_checkpoint(ckpt_path: str, directory: Path) -> Path:
    """Return the path of a checkpoint; "last" is of the run in `directory`, else beside it.

    Raises:
        UserError: there is none.
    """
    if ckpt_path != "last":
        return Path(ckpt_path)
    if (directory / LAST).is_file():
        return directory / LAST
    found = [path for path in directory.parent.glob(f"*/{LAST}") if path.is_file()]
    if not found:
        raise UserError(f"{WHO}: ckpt_path=last found no */{LAST} in {directory.parent}.")
    return max(found, key=lambda path: path.stat().st_mtime)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of train.py; its tensors are memory-mapped.

    Raises:
        UserError: `path` is not a file, is damaged, or is not a complete checkpoint.
    """
    if not path.is_file():
        own = path / LAST if (path / LAST).is_file() else f"{LAST} in its directory"
        raise UserError(
            f"{WHO}: ckpt_path must be a checkpoint file; got {path}. A run's checkpoint is {own}."
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many types, and its advice would be wrong here
        why = error.strerror if isinstance(error, OSError) and error.strerror else None
        raise UserError(
            f"{WHO}: ckpt_path={path} cannot be read: "
            f"{why or 'it is truncated, or was not written by train.py'}. Give another checkpoint."
        ) from None
    parts = checkpoint if isinstance(checkpoint, dict) else {}
    wrong = [key for key, kind in KINDS.items() if not isinstance(parts.get(key), kind)]
    if wrong:
        raise UserError(
            f"{WHO}: ckpt_path={path} has no {', '.join(wrong)} as train.py writes them. A run "
            "resumes only from a complete checkpoint of train.py, not from weights alone."
        )
    return checkpoint


def check_checkpoint(
    checkpoint: Mapping[str, Any], path: Path, identity: Mapping[str, Any], max_epochs: int | None
) -> None:
    """Refuse the checkpoint of another arm, seed, model, data or optimizer, or of a longer run.

    Raises:
        UserError: the checkpoint belongs to another run.
    """
    for key, own in identity.items():
        if checkpoint["run"].get(key) != own:
            raise UserError(
                f"{WHO}: the checkpoint has {key} {checkpoint['run'].get(key)!r}, this run has "
                f"{own!r} (ckpt_path={path}). Resume with the {key} of the checkpoint."
            )
    epochs = epochs_done(checkpoint)
    if max_epochs is not None and 0 <= max_epochs < epochs:
        raise UserError(
            f"{WHO}: ckpt_path={path} was trained for {epochs} epochs, more than "
            f"trainer.max_epochs={max_epochs}. Set trainer.max_epochs={epochs} or more."
        )


def load_checkpoint(checkpoint: Mapping[str, Any], path: Path, model: LightningModule) -> None:
    """Load the weights early, so that another model's checkpoint is refused before data is read.

    Raises:
        UserError: names, shapes or types of the tensors differ, or the optimizer's state lacks
            something.
    """
    weights, own = checkpoint["state_dict"], model.state_dict()
    differ = [
        key
        for key in [*own, *(weights.keys() - own.keys())]
        if getattr(weights.get(key), "shape", None) != getattr(own.get(key), "shape", 0)
    ]
    if differ:
        raise UserError(
            f"{WHO}: ckpt_path={path} is of another model: {len(differ)} tensors differ in name or "
            f"shape; the first is {differ[0]}. Resume with the model and data of the checkpoint."
        )
    model.load_state_dict(weights)
    kinds = {key: type(value) for key, value in probe_optimizer(model.optimizer).items()}
    trained = sum(p.requires_grad for p in model.parameters())
    try:
        states = checkpoint["optimizer_states"][0]["state"].values()
        whole = len(states) == (trained if kinds else 0)
        whole &= all({k: type(v) for k, v in state.items()} == kinds for state in states)
    except (AttributeError, IndexError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UserError(
            f"{WHO}: ckpt_path={path} lacks part of the optimizer's state. Give a checkpoint that "
            "train.py wrote with the same optimizer."
        )


def epochs_done(checkpoint: Mapping[str, Any]) -> int:
    """Return the number of epochs that the checkpoint's run has completed."""
    # Lightning writes a checkpoint before it increments the epoch, even after the last batch.
    return int(checkpoint["epoch"]) + _ends_epoch(checkpoint)


def steps_per_epoch(checkpoint: Mapping[str, Any]) -> int | None:
    """Optimizer steps per epoch of the checkpoint's run; None if it was written mid-epoch."""
    if not _ends_epoch(checkpoint):
        return None
    return int(checkpoint["global_step"]) // epochs_done(checkpoint)


def _ends_epoch(checkpoint: Mapping[str, Any]) -> bool:
    try:
        return bool(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{WHO}: the checkpoint's loops are damaged ({error}).") from None


def continue_logs(step: int, checkpoint: Path, directory: Path, loggers: Iterable[Logger]) -> None:
    """Continue `metrics.csv` and `variance.csv` of the checkpoint's run.

    Rows from `step` on are dropped, since those steps will be trained again; `VarianceLogger` drops
    its own. If the checkpoint is not in a run's directory, there is nothing to continue.
    """
    source = checkpoint.resolve().parents[1]
    if source != directory.resolve() and (source / VARIANCE).is_file():
        shutil.copyfile(source / VARIANCE, directory / VARIANCE)
    rows = whole_rows(source / METRICS) if (source / METRICS).is_file() else []
    for logger in loggers:
        if not isinstance(logger, CSVLogger):
            continue
        logger.experiment  # noqa: B018 - the first access deletes the file
        for row in rows:
            if int(row["step"]) < step:
                values = {key: value for key, value in row.items() if value and key != "step"}
                logger.log_metrics(values, int(row["step"]))  # type: ignore[arg-type]
        logger.save()


def whole_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, without a last line that a kill truncated."""
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if line.endswith("\n")))
