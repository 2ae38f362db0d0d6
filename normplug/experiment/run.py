"""One run of train.py: from its configuration to its result."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from typing import Any

import hydra
import torch
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    Checkpoint,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
)
from omegaconf import DictConfig

from normplug.experiment.callbacks import Checkpoints, Scores
from normplug.experiment.config import fuses_norms, uses_gpu
from normplug.experiment.data import Source
from normplug.experiment.errors import CONFIGS, WHO, UserError, user_sentence
from normplug.experiment.graph import refuse_graph
from normplug.experiment.learner import Learner, configure_optimizers
from normplug.experiment.models import apply_arm
from normplug.experiment.task import Run, say, task_wrapper

EMPTY_GROUP = re.compile(r"^(callbacks|logger)=null$")
SHOWS_ALL = "HYDRA_FULL_ERROR" in os.environ  # Hydra's setting for whole tracebacks


@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")
@task_wrapper
def train(cfg: DictConfig, run: Run) -> None:
    """Train and test one arm."""
    seed_everything(cfg.seed, workers=True, verbose=False)
    data: Source = instantiate(cfg.data, _convert_="all")
    if cfg.compile:
        # Dynamo's recompile limit counts the graphs of a forward over all runs of the process.
        torch.compiler.reset()
    module = make_module(cfg, data)
    callbacks = instantiate_group(cfg.get("callbacks"))
    loggers = instantiate_group(cfg.get("logger"))
    trainer = make_trainer(cfg, run, data, callbacks, loggers)

    checkpoint = run.begin(trainer)
    if data.about():
        say(data.about())
    if cfg.train:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        checkpoint = best_checkpoint(trainer)
    trainer.test(module, datamodule=data, ckpt_path=checkpoint, verbose=False)
    run.finish(trainer, module, data)


def make_module(cfg: DictConfig, data: Source) -> LightningModule:
    """Build the model with its norms in the mode of the arm.

    A `model._target_` that is a LightningModule trains by its own steps. Without
    `configure_optimizers` it gets the optimizer and the schedule of the configuration. A network
    becomes a `Learner`.
    """
    model = instantiate(cfg.model, **data.sizes, _convert_="all")
    apply_arm(model, cfg, fuses_norms(cfg))
    if cfg.channels_last:
        model.to(memory_format=torch.channels_last)
    if cfg.compile:
        model.compile(mode=cfg.compile if isinstance(cfg.compile, str) else None)
    if not isinstance(model, LightningModule):
        return Learner(model, data.measure, cfg)
    if cfg.graph:
        raise UserError(
            f"{WHO}: graph=true needs a network, whose step it records; model._target_ is a "
            "LightningModule. Leave graph=true out."
        )
    if not configures_optimizers(model):
        model.configure_optimizers = partial(  # type: ignore[method-assign]
            configure_optimizers, model, cfg
        )
    return model


def configures_optimizers(module: LightningModule) -> bool:
    """Whether the class of a LightningModule has an optimizer of its own."""
    return type(module).configure_optimizers is not LightningModule.configure_optimizers


def instantiate_group(group: DictConfig | None) -> list[Any]:
    """Build the callbacks or loggers of a group; a null among them is left out."""
    nodes = group.values() if group else ()
    return [instantiate(node) for node in nodes if node is not None]


def make_trainer(
    cfg: DictConfig,
    run: Run,
    data: Source,
    callbacks: list[Callback],
    loggers: list[Any],
) -> Trainer:
    """Build the Trainer, and set its keys that are "auto"."""
    if not loggers:  # LearningRateMonitor raises without a logger
        callbacks = [c for c in callbacks if not isinstance(c, LearningRateMonitor)]
    settings = cfg.trainer.copy()
    if not settings.enable_progress_bar:
        callbacks = [c for c in callbacks if not isinstance(c, ProgressBar)]
    if settings.precision == "auto":
        settings.precision = "bf16-mixed" if uses_gpu(cfg) else "32-true"
    if settings.enable_checkpointing == "auto":
        settings.enable_checkpointing = any(isinstance(c, Checkpoint) for c in callbacks)
    labels = ("arm", "seed", "model", "data")
    identity = {key: run.labels[key] for key in labels}
    identity["optimizer"] = cfg.optimizer._target_
    identity["batch_size"] = data.batch_size
    run.scores = Scores(data.measure)
    plugins = [*(instantiate(settings.get("plugins")) or ())]
    trainer = instantiate(
        settings,
        callbacks=[*callbacks, run.scores, run.timer, run.block_drop],
        logger=loggers,
        plugins=[*plugins, Checkpoints(run.scores, identity)],
    )
    reruns = not getattr(trainer.strategy.launcher, "is_interactive_compatible", True)
    if run.in_sweep and reruns and trainer.num_devices > 1:
        raise UserError(
            f"{WHO}: {trainer.num_devices} devices with {type(trainer.strategy).__name__} "
            "start each process by running the command again, and with -m that is the whole "
            "sweep. Set trainer.devices=1, run the arms one by one, or use torchrun."
        )
    if cfg.graph:
        refuse_graph(trainer)
    return trainer


def best_checkpoint(trainer: Trainer) -> str | None:
    """The checkpoint with the best monitored score; None if no callback monitors one."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor:
            return callback.best_model_path or None
    return None


def main() -> None:
    """Run the command line; a mistake in it gives one sentence."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print
    # Hydra accepts an empty list of choices for a group, but no null.
    sys.argv = [EMPTY_GROUP.sub(r"\1=[]", word) for word in sys.argv]
    try:
        train()
    except Exception as error:
        sentence = user_sentence(error)
        if sentence is None or SHOWS_ALL:
            raise
        print(sentence, file=sys.stderr)
        sys.exit(1)
