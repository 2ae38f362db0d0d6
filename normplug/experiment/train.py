"""The training of one run, from its configuration to its result."""

from __future__ import annotations

import hydra
import torch
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig

import normplug
from normplug.experiment.config import mode_of
from normplug.experiment.learner import Learner
from normplug.experiment.measure import BASELINE
from normplug.experiment.models import scale_norm_weights
from normplug.experiment.run import Run, task
from normplug.experiment.sweep import CONFIGS, command


@command
@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")
@task
def main(cfg: DictConfig, run: Run) -> None:
    """Train and test one arm."""
    seed_everything(cfg.seed, workers=True, verbose=False)
    data = instantiate(cfg.data, _convert_="all")
    net = instantiate(cfg.model, **data.sizes, _convert_="all")
    if cfg.gamma0 is not None:
        filters = {name: cfg.swap.get(name) for name in ("include", "exclude")}
        scale_norm_weights(net, cfg.gamma0, **filters)
    if cfg.mode != BASELINE:  # after init, so that all arms start with the same weights
        normplug.swap(net, mode_of(cfg.mode), **cfg.swap)
        if run.fuses:
            normplug.fuse(net, recompute=cfg.recompute)
    if cfg.channels_last:
        net.to(memory_format=torch.channels_last)
    if cfg.compile:
        net.compile()

    optimizer = instantiate(cfg.optimizer, _convert_="all")  # checkpoints have plain lists only
    identity = {
        **{key: run.labels[key] for key in ("arm", "seed", "model", "data")},
        "optimizer": cfg.optimizer._target_,
        "batch_size": data.batch_size,
    }
    model = Learner(
        net,
        data.measure,
        optimizer,
        seed=cfg.seed,
        schedule=cfg.schedule,
        warmup=cfg.warmup,
        cycle_momentum=cfg.cycle_momentum,
        label_smoothing=cfg.label_smoothing,
        graph=cfg.graph,
        identity=identity,
    )
    trainer = run.trainer()
    checkpoint = run.begin(trainer)
    if cfg.train:
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
        kept = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        checkpoint = next((c.best_model_path for c in kept if c.monitor), None) or None
    trainer.test(model, datamodule=data, ckpt_path=checkpoint, verbose=False)
    run.finish(trainer, model, data)
