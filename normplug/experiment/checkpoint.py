"""Checkpoints: how they are written, from which one a run may resume, and the logs beside them."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger

from normplug._report.files import replace_file

LAST = Path("checkpoints", "last.ckpt")  # in a run's directory
KEYS = ("state_dict", "optimizer_states", "loops", "epoch", "global_step", "run")
METRICS, VARIANCE = "metrics.csv", "variance.csv"


class AtomicCheckpoints(TorchCheckpointIO):
    """Write a checkpoint beside its final place, then rename it.

    A kill during the write leaves the former checkpoint. Lightning itself writes to the system's
    temporary directory: if that is on another disk, the file is copied and not renamed.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replace_file(Path(path)) as part:
            torch.save(checkpoint, part)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint of train.py; its tensors stay in the file until they are used.

    Raises:
        ValueError: `path` is not a file, is damaged, or holds less than a whole checkpoint.
    """
    if not path.is_file():
        own = path / LAST if (path / LAST).is_file() else f"{LAST} in its directory"
        raise ValueError(
            f"normplug.experiment: ckpt_path must be a checkpoint file; got {path}. "
            f"A run's own is {own}."
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds, and its advice would be wrong here
        why = error.strerror if isinstance(error, OSError) and error.strerror else None
        raise ValueError(
            f"normplug.experiment: ckpt_path={path} cannot be read: "
            f"{why or 'it is cut off, or train.py did not write it'}. Give another checkpoint."
        ) from None
    lacking = [key for key in KEYS if not isinstance(checkpoint, dict) or key not in checkpoint]
    if lacking:
        raise ValueError(
            f"normplug.experiment: ckpt_path={path} lacks {', '.join(lacking)}. A run resumes only "
            "from a whole checkpoint of train.py, not from weights alone."
        )
    return checkpoint


def check_identity(
    checkpoint: Mapping[str, Any], path: Path, identity: Mapping[str, Any], max_epochs: int | None
) -> None:
    """Refuse the checkpoint of another arm, seed, model, data or optimizer, or of a longer run.

    `identity` and `max_epochs` (None or -1 for no limit) are those of this run.

    Raises:
        ValueError: the checkpoint belongs to another run.
    """
    saved = checkpoint["run"]
    if saved.get("split") != identity["split"]:
        raise ValueError(
            f"normplug.experiment: ckpt_path={path} was written by another version of normplug, "
            "which held out other data for validation. Train again from the start."
        )
    for key, own in identity.items():
        if saved.get(key) != own:
            raise ValueError(
                f"normplug.experiment: the checkpoint is of {key} {saved.get(key)!r}, this run of "
                f"{own!r} (ckpt_path={path}). Resume with the {key} of the checkpoint."
            )
    epochs = epochs_done(checkpoint)
    if max_epochs is not None and 0 <= max_epochs < epochs:
        raise ValueError(
            f"normplug.experiment: ckpt_path={path} has trained {epochs} epochs, more than "
            f"trainer.max_epochs={max_epochs}. Give at least trainer.max_epochs={epochs}."
        )


def load_weights(checkpoint: Mapping[str, Any], path: Path, model: LightningModule) -> None:
    """Load the weights; so a checkpoint of another model is refused before the data is read.

    Raises:
        ValueError: names or shapes of the tensors differ.
    """
    weights = checkpoint["state_dict"]
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        own = model.state_dict()
        differ = [
            key
            for key in [*own, *(weights.keys() - own.keys())]
            if key not in weights or key not in own or weights[key].shape != own[key].shape
        ]
        first = f", the first of them {differ[0]}" if differ else ""
        raise ValueError(
            f"normplug.experiment: ckpt_path={path} is of another model: {len(differ)} tensors "
            f"differ in name or shape{first}. Resume with the model and data of the checkpoint."
        ) from None


def epochs_done(checkpoint: Mapping[str, Any]) -> int:
    """How many whole epochs were trained before the checkpoint."""
    # A checkpoint is written within its epoch, which Lightning counts only when it resumes.
    return int(checkpoint["epoch"]) + _ends_epoch(checkpoint)


def steps_per_epoch(checkpoint: Mapping[str, Any]) -> int | None:
    """Optimizer steps in an epoch of the checkpoint's run; None if written within an epoch."""
    if not _ends_epoch(checkpoint):
        return None
    return int(checkpoint["global_step"]) // epochs_done(checkpoint)


def _ends_epoch(checkpoint: Mapping[str, Any]) -> bool:
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    return bool(progress["is_last_batch"])


def continue_logs(
    checkpoint: Mapping[str, Any], path: Path, directory: Path, loggers: Iterable[Logger]
) -> None:
    """Continue `metrics.csv` and `variance.csv` of the checkpoint's run, up to the checkpoint.

    Rows of later steps are dropped, as those steps are trained again; `VarianceLogger` drops its
    own. If the checkpoint is not in a run's directory, there is nothing to continue.
    """
    source = path.resolve().parent.parent
    variance = directory / VARIANCE
    if source != directory.resolve() and (source / VARIANCE).is_file():
        shutil.copyfile(source / VARIANCE, variance)
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            _continue_metrics(logger, source / METRICS, checkpoint["global_step"])


def _continue_metrics(logger: CSVLogger, source: Path, step: int) -> None:
    target = Path(logger.log_dir) / METRICS
    kept = target.with_name(f"{METRICS}.kept")  # a kill while the file is rewritten loses nothing
    if not kept.exists():
        if not source.is_file():
            return
        with replace_file(kept) as part:
            shutil.copyfile(source, part)
    logger.experiment  # noqa: B018 - its first use deletes the file
    for row in whole_rows(kept):
        if int(row["step"]) < step:
            values = {key: value for key, value in row.items() if value and key != "step"}
            logger.log_metrics(values, int(row["step"]))  # type: ignore[arg-type]
    logger.save()
    kept.unlink()


def whole_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, without a last line that a kill cut off."""
    with path.open(newline="") as file:
        lines = file.readlines()
    return list(csv.DictReader(line for line in lines if line.endswith("\n")))
