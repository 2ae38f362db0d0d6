"""Train an image classifier with one kind of norm, and report what it cost and gave.

    python train.py mode=golden
    python train.py -m mode=baseline,standard,golden seed=0,1,2

The configuration is in configs/; `python train.py --help` lists it.
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

    from normplug.experiment.checks import accept_null_groups
    from normplug.experiment.classifier import Classifier
    from normplug.experiment.models import scale_norm_weights
    from normplug.experiment.run import BASELINE, Run

CONFIGS = str(Path(__file__).resolve().with_name("configs"))


@accept_null_groups(CONFIGS)
@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Train and test one arm; return its test accuracy."""
    with Run(cfg) as run:
        run.start()
        if run.finished:
            return run.result["test_accuracy"]
        seed_everything(cfg.seed, workers=True)
        data = instantiate(cfg.data)
        net = instantiate(cfg.model, num_classes=data.num_classes, image_size=data.image_size)
        if cfg.gamma0 is not None:
            scale_norm_weights(net, cfg.gamma0)
        if cfg.mode != BASELINE:  # after the initial weights are drawn: every arm has the same ones
            normplug.swap(net, cfg.mode, **cfg.swap)
            if run.fuses:
                normplug.fuse(net, recompute=cfg.recompute)
        if cfg.channels_last:
            net.to(memory_format=torch.channels_last)
        if cfg.compile:
            net.compile()

        model = Classifier(
            net,
            data.num_classes,
            instantiate(cfg.optimizer, _convert_="all"),  # plain lists: they go into checkpoints
            schedule=cfg.schedule,
            warmup=cfg.warmup,
            label_smoothing=cfg.label_smoothing,
            identity=run.identity,
            channels_last=cfg.channels_last,
        )
        loggers = run.built("logger")
        run.resume(model, loggers)
        trainer = run.trainer(run.built("callbacks"), logger=loggers)
        trainer.fit(model, datamodule=data, ckpt_path=run.checkpoint)
        trainer.test(model, datamodule=data, verbose=False)
        return run.finish(trainer, model, data)
    return None


if __name__ == "__main__":
    main()
