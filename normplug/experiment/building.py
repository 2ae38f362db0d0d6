"""Build the callbacks, the loggers and the Trainer of a configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from omegaconf import DictConfig

from normplug.experiment.checkpoint import AtomicCheckpoints
from normplug.experiment.command import is_sweep
from normplug.experiment.divergence import FiniteLoss
from normplug.experiment.errors import WHO, UserError
from normplug.experiment.graph import refuse_graph
from normplug.experiment.streams import SeedEpochs
from normplug.experiment.timing import EpochLines, StepTimer


def on_gpu(cfg: DictConfig) -> bool:
    """Whether the Trainer will take a GPU."""
    return cfg.trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def fuses(cfg: DictConfig) -> bool:
    """Whether to fuse the swapped norms: as configured; if that is null, only on a GPU."""
    return on_gpu(cfg) if cfg.fuse is None else cfg.fuse


def build_group(cfg: DictConfig, group: str) -> list[Any]:
    """Build the callbacks or the loggers of a group; skip those that are null.

    Raises:
        UserError: a `_target_` builds neither a callback nor a logger.
    """
    nodes = cfg.get(group) or {}
    objects = {name: instantiate(node) for name, node in nodes.items() if node is not None}
    for name, made in objects.items():
        if not isinstance(made, (Callback, Logger)):
            raise UserError(
                f"{WHO}: {group}.{name}._target_ must make a Lightning callback or logger; got "
                f"{type(made).__name__} from {nodes[name]._target_}."
            )
    return list(objects.values())


def build_trainer(
    cfg: DictConfig,
    callbacks: Sequence[Callback],
    loggers: list[Logger],
    timer: StepTimer,
    directory: Path,
) -> Trainer:
    """Build the configured Trainer, and decide the settings that are "auto".

    The callbacks that every run needs are added to the configured ones.

    Raises:
        UserError: a sweep with a strategy that would repeat the sweep in every process, or
            `graph=true` in a run that cannot use it.
    """
    settings = cfg.trainer.copy()
    parts: dict[str, Any] = {}
    callbacks = list(callbacks)
    if not loggers:  # LearningRateMonitor raises without a logger
        callbacks = [c for c in callbacks if not isinstance(c, LearningRateMonitor)]
    if "enable_checkpointing" not in settings:  # else Lightning adds its own ModelCheckpoint
        parts["enable_checkpointing"] = any(isinstance(c, Checkpoint) for c in callbacks)
    if settings.precision == "auto":
        settings.precision = "bf16-mixed" if on_gpu(cfg) else "32-true"
    if settings.enable_progress_bar == "auto":
        settings.enable_progress_bar = sys.stdout.isatty() and not is_sweep()
        if not settings.enable_progress_bar:
            callbacks.append(EpochLines(str(directory)))
    if "profiler" not in settings:
        parts["profiler"] = timer.clock
    plugins = list(instantiate(settings.get("plugins")) or ())
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpoints())
    callbacks += [SeedEpochs(cfg.seed), FiniteLoss(), timer]
    trainer = instantiate(settings, callbacks=callbacks, logger=loggers, plugins=plugins, **parts)
    _refuse_rerun_of_sweep(trainer)
    if cfg.graph:
        refuse_graph(trainer)
    return trainer


def _refuse_rerun_of_sweep(trainer: Trainer) -> None:
    # A launcher that is not interactive-compatible starts each process by rerunning the command.
    launcher = trainer.strategy.launcher
    reruns_command = launcher is not None and not launcher.is_interactive_compatible
    if is_sweep() and reruns_command and trainer.num_devices > 1:
        raise UserError(
            f"{WHO}: {trainer.num_devices} devices with {type(trainer.strategy).__name__} start "
            "each process by running the command again, and with -m that is the whole sweep. "
            "Set trainer.devices=1, run the arms one by one (for mode in ...; do python train.py "
            "mode=$mode ...; done), or use torchrun."
        )
