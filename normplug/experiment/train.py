"""The training of one run from its command line to its result, and the comparison of a sweep."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

import normplug
from normplug.experiment.config import mode_of, user_sentence
from normplug.experiment.learner import Learner
from normplug.experiment.measure import BASELINE
from normplug.experiment.models import scale_norm_weights
from normplug.experiment.run import Run, task

# The packed copy of a wheel, or the directory of a checkout.
PACKED, CHECKOUT = (Path(__file__).with_name("configs"), Path(__file__).parents[2] / "configs")
CONFIGS = str(PACKED if PACKED.is_dir() else CHECKOUT)
SHOWS_ALL = "HYDRA_FULL_ERROR" in os.environ  # Hydra's setting for whole tracebacks


def command(application: Callable[[], Any]) -> Callable[[], Any]:
    """Decorate a Hydra application: a mistake in its command line gives one sentence.

    The command line also accepts `GROUP=null` for Hydra's `GROUP=[]`. With `data=text` and no
    model, it selects a language model.
    """

    @functools.wraps(application)
    def wrapper() -> Any:
        groups = {path.name for path in Path(CONFIGS).iterdir() if path.is_dir()}
        given = [text.partition("=") for text in sys.argv[1:]]
        if "data=text" in sys.argv and not {"model", "experiment"} & {key for key, *_ in given}:
            given.append(("model", "=", "gpt_tiny"))
        sys.argv[1:] = [
            f"{key}=[]" if key in groups and value == "null" else f"{key}{sign}{value}"
            for key, sign, value in given
        ]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print
        try:
            return application()
        except Exception as error:
            sentence = user_sentence(error)
            if sentence is None or SHOWS_ALL:
                raise
            print(sentence, file=sys.stderr)
            sys.exit(1)

    return wrapper


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

    identity = {key: run.labels[key] for key in ("arm", "seed", "model", "data")}
    identity |= {"optimizer": cfg.optimizer._target_, "batch_size": data.batch_size}
    model = Learner(net, data.measure, cfg, identity)
    trainer = run.trainer()
    checkpoint = run.begin(trainer)
    if cfg.train:
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
        kept = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        checkpoint = next((c.best_model_path for c in kept if c.monitor), None) or None
    trainer.test(model, datamodule=data, ckpt_path=checkpoint, verbose=False)
    run.finish(trainer, model, data)


class CompareArms(Callback):
    """Compare the arms of a sweep when it ends."""

    @rank_zero_only
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from normplug.experiment.compare import main  # which training need not import

        if code := main([str(config.hydra.sweep.dir)]):
            sys.exit(code)
