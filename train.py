"""Train a network with its norms in one mode; report accuracy or loss, speed and memory.

    python train.py mode=golden
    python train.py -m mode=baseline,standard,golden seed=0,1,2

The configuration is in configs/; `python train.py --help` lists all options.
"""

from pathlib import Path

import torch

import normplug
from normplug._extras import needs

with needs("train.py", "train", SystemExit):
    import hydra
    from hydra.utils import instantiate
    from lightning.pytorch import seed_everything
    from omegaconf import DictConfig

    from normplug._report.arms import BASELINE
    from normplug.experiment.building import build_group, fuses
    from normplug.experiment.command import accept_null_groups
    from normplug.experiment.models import scale_norm_weights
    from normplug.experiment.names import mode_of
    from normplug.experiment.run import Run

CONFIGS = str(Path(__file__).resolve().with_name("configs"))


@accept_null_groups(CONFIGS)
@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Train and test one arm; return its accuracy or loss on the test set."""
    with Run(cfg) as run:
        run.start()
        if run.finished:
            return run.score
        seed_everything(cfg.seed, workers=True)
        data = instantiate(cfg.data)
        net = instantiate(cfg.model, **data.sizes)
        if cfg.gamma0 is not None:
            filters = {name: cfg.swap.get(name) for name in ("include", "exclude")}
            scale_norm_weights(net, cfg.gamma0, **filters)
        if cfg.mode != BASELINE:  # after init, so that all arms start with the same weights
            normplug.swap(net, mode_of(cfg.mode), **cfg.swap)
            if fuses(cfg):
                normplug.fuse(net, recompute=cfg.recompute)
        if cfg.channels_last:
            net.to(memory_format=torch.channels_last)
        if cfg.compile:
            net.compile()

        model = data.learner(
            net,
            instantiate(cfg.optimizer, _convert_="all"),  # weights_only=True loads only plain lists
            schedule=cfg.schedule,
            warmup=cfg.warmup,
            label_smoothing=cfg.label_smoothing,
            graph=cfg.graph,
            identity=run.identity,
            channels_last=cfg.channels_last,
        )
        loggers = build_group(cfg, "logger")
        run.resume(model, loggers)
        trainer = run.trainer(build_group(cfg, "callbacks"), loggers)
        trainer.fit(model, datamodule=data, ckpt_path=run.checkpoint)
        trainer.test(model, datamodule=data, verbose=False)
        return run.finish(trainer, model, data)
    return None  # a run of a sweep failed, and `Run` has recorded it


if __name__ == "__main__":
    main()
