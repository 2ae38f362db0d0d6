"""Write and read checkpoints, check that a run may resume from one, and continue its logs."""

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
from normplug._report.run_files import METRICS, VARIANCE

LAST = Path("checkpoints", "last.ckpt")  # in a run's directory
KEYS = ("state_dict", "optimizer_states", "loops", "epoch", "global_step", "run")


class AtomicCheckpoints(TorchCheckpointIO):
    """Write each checkpoint to a temporary file beside its destination, then rename that file.

    A kill during the write leaves the previous checkpoint. Lightning itself writes to the system's
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
    """Read a checkpoint of train.py; its tensors are memory-mapped.

    Raises:
        ValueError: `path` is not a file, is damaged, or is not a complete checkpoint.
    """
    if not path.is_file():
        own = path / LAST if (path / LAST).is_file() else f"{LAST} in its directory"
        raise ValueError(
            f"normplug.experiment: ckpt_path must be a checkpoint file; got {path}. "
            f"A run's checkpoint is {own}."
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many types, and its advice would be wrong here
        why = error.strerror if isinstance(error, OSError) and error.strerror else None
        raise ValueError(
            f"normplug.experiment: ckpt_path={path} cannot be read: "
            f"{why or 'it is truncated, or was not written by train.py'}. Give another checkpoint."
        ) from None
    lacking = [key for key in KEYS if not isinstance(checkpoint, dict) or key not in checkpoint]
    if lacking:
        raise ValueError(
            f"normplug.experiment: ckpt_path={path} lacks {', '.join(lacking)}. A run resumes only "
            "from a complete checkpoint of train.py, not from weights alone."
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
                f"normplug.experiment: the checkpoint has {key} {saved.get(key)!r}, this run has "
                f"{own!r} (ckpt_path={path}). Resume with the {key} of the checkpoint."
            )
    epochs = epochs_done(checkpoint)
    if max_epochs is not None and 0 <= max_epochs < epochs:
        raise ValueError(
            f"normplug.experiment: ckpt_path={path} was trained for {epochs} epochs, more than "
            f"trainer.max_epochs={max_epochs}. Set trainer.max_epochs={epochs} or more."
        )


def load_weights(checkpoint: Mapping[str, Any], path: Path, model: LightningModule) -> None:
    """Load the weights early, so that another model's checkpoint is refused before data is read.

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
        first = f"; the first is {differ[0]}" if differ else ""
        raise ValueError(
            f"normplug.experiment: ckpt_path={path} is of another model: {len(differ)} tensors "
            f"differ in name or shape{first}. Resume with the model and data of the checkpoint."
        ) from None


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
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    return bool(progress["is_last_batch"])


def continue_logs(
    checkpoint: Mapping[str, Any], path: Path, directory: Path, loggers: Iterable[Logger]
) -> None:
    """Continue `metrics.csv` and `variance.csv` of the checkpoint's run, up to the checkpoint.

    Rows of later steps are dropped, since those steps will be trained again; `VarianceLogger` drops
    its own. If the checkpoint is not in a run's directory, there is nothing to continue.
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
    kept = target.with_name(f"{METRICS}.kept")  # a backup, in case of a kill during the rewrite
    if not kept.exists():
        if not source.is_file():
            return
        with replace_file(kept) as part:
            shutil.copyfile(source, part)
    logger.experiment  # noqa: B018 - the first access deletes the file
    for row in whole_rows(kept):
        if int(row["step"]) < step:
            values = {key: value for key, value in row.items() if value and key != "step"}
            logger.log_metrics(values, int(row["step"]))  # type: ignore[arg-type]
    logger.save()
    kept.unlink()


def whole_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, without a last line that a kill truncated."""
    with path.open(newline="") as file:
        lines = file.readlines()
    return list(csv.DictReader(line for line in lines if line.endswith("\n")))
