"""The LightningModule: steps, optimizer and schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from normplug._measure import ACCURACY, Measure
from normplug._swap.inventory import Inventory
from normplug.experiment.callbacks import is_logged, variance_loggers
from normplug.experiment.data import MODEL, Batch, stream_seed
from normplug.experiment.errors import WHO, UserError
from normplug.experiment.graph import GraphedLoss, Loss
from normplug.experiment.models import heads


def make_optimizer(net: nn.Module, cfg: DictConfig) -> Optimizer:
    """Build the optimizer. Norms and the head have `factors`; of the rest, only matrices decay."""
    special: dict[Tensor, Mapping[str, float]] = {}
    for norm in Inventory(net).norms:
        for name, parameter in norm.named_parameters():
            kind = "norm_bias" if name.endswith("bias") else "norm_weight"
            special[parameter] = cfg.factors[kind]
    for head in heads(net):
        special[head.weight] = cfg.factors["head"]
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for p in net.parameters():
        if p.requires_grad:
            factors = special.get(p, {"lr": 1.0, "decay": float(p.dim() > 1)})
            groups.setdefault((factors["lr"], factors["decay"]), []).append(p)
    # Converted: checkpoints have plain lists only.
    make = instantiate(cfg.optimizer, _convert_="all")
    optimizer: Optimizer = make([{"params": params} for params in groups.values()])
    for group, (rate, decay) in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] *= rate
        group["weight_decay"] = decay * group.get("weight_decay", 0.0)
    return optimizer


def make_scheduler(
    optimizer: Optimizer,
    steps: int,
    name: str,
    warmup: float,
    cycle_momentum: bool = False,
) -> lr_scheduler.LRScheduler:
    """Return a schedule of `steps` optimizer steps, whose peaks are the optimizer's learning rates.

    It is "one_cycle" (Smith 2018, arXiv:1803.09820; below 4 steps "cosine"), or a linear warm-up
    followed by "cosine" annealing to 0 or a "constant" rate. configs/train.yaml has the options.
    """
    if name == "one_cycle" and steps >= 4:
        rates = [group["lr"] for group in optimizer.param_groups]
        # At least 2 steps rise, since OneCycleLR divides by their number minus 1.
        rising = max(warmup, 2 / steps)
        return lr_scheduler.OneCycleLR(
            optimizer, rates, steps, pct_start=rising, cycle_momentum=cycle_momentum
        )
    rising = round(warmup * steps)
    after: lr_scheduler.LRScheduler = lr_scheduler.ConstantLR(optimizer, 1.0)
    if name != "constant":
        after = lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - rising))
    if rising == 0:
        return after
    rise = lr_scheduler.LinearLR(optimizer, 1 / rising, total_iters=max(1, rising - 1))
    return lr_scheduler.SequentialLR(optimizer, [rise, after], [rising])


def configure_optimizers(module: LightningModule, cfg: DictConfig) -> Any:
    """Return the optimizer and the schedule of the configuration, as Lightning reads them."""
    trainer = module.trainer
    optimizer = make_optimizer(module, cfg)
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps):
        raise UserError(
            f"{WHO}: the schedule needs a last step; got trainer.max_epochs="
            f"{trainer.max_epochs}. Set it above 0, or set +trainer.max_steps."
        )
    scheduler = make_scheduler(
        optimizer, int(steps), cfg.schedule, cfg.warmup, cfg.cycle_momentum
    )
    if getattr(trainer.precision_plugin, "scaler", None) is None:
        # There is nothing to unscale. With True, Lightning would not clip for a fused optimizer.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Learner(LightningModule):
    """Train `net` to predict classes: the label of an image, or the next token.

    A run that resumes takes the weights, the optimizer's moments and the step from its checkpoint;
    the rest, such as the schedule and its length, from its own command. `cfg` has the keys of
    configs/train.yaml.
    """

    def __init__(self, net: nn.Module, measure: Measure, cfg: DictConfig) -> None:
        super().__init__()
        self.net = net
        self.measure = measure
        self.cfg = cfg
        self._graphed: GraphedLoss | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.net(inputs)
        return getattr(outputs, "logits", outputs)  # of a ModelOutput of transformers

    def loss(
        self, inputs: Tensor, targets: Tensor, label_smoothing: float = 0.0
    ) -> Tensor:
        """The mean cross-entropy over all targets."""
        logits = self(inputs).flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten(), label_smoothing=label_smoothing)

    def training_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss that is minimised, with the label smoothing of the configuration."""
        return self.loss(inputs, targets, self.cfg.label_smoothing)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        step: int = self.trainer.global_step
        is_measured = any(
            each.logged_step == step for each in variance_loggers(self.trainer)
        )
        loss_of: Loss = self.training_loss
        if self._graphed is not None and not is_measured:
            loss_of = self._graphed
        loss = loss_of(*batch)
        if is_logged(self.trainer):
            self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Batch) -> None:
        inputs, targets = batch
        logits = self(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        self.log_mean(f"{stage}/loss", loss, len(targets), prog_bar=True)
        if self.measure == ACCURACY:
            accuracy = (logits.argmax(-1) == targets).float().mean()
            self.log_mean(f"{stage}/accuracy", accuracy, len(targets), prog_bar=True)

    def log_mean(self, name: str, value: Tensor, samples: int, **options: Any) -> None:
        """Log the mean of a batch, to be averaged over the samples of all batches and processes."""
        # Lightning divides the processes' mean sum by their mean count, which it rounds down.
        # Multiplied by the number of processes, the mean count is a whole number.
        count = samples * self.trainer.world_size
        self.log(name, value, sync_dist=True, batch_size=count, **options)

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = configure_optimizers(self, self.cfg)
        self._groups = [dict(group) for group in optimizers[0].param_groups]
        return optimizers, schedulers

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Drop the schedule's state, which `on_train_start` recomputes."""
        epochs = checkpoint["epoch"] + 1
        limit = self.trainer.max_epochs
        if limit is not None and 0 <= limit < epochs:
            raise ValueError(
                f"it has {epochs} epochs, more than trainer.max_epochs={limit}"
            )
        checkpoint["lr_schedulers"] = []

    def on_fit_start(self) -> None:
        if self.cfg.graph:
            self._graphed = GraphedLoss(self.training_loss, self.net)

    def on_fit_end(self) -> None:
        """Free the graphs: the model moves to the host next, and they read its old addresses."""
        if self._graphed is not None:
            self._graphed.release()
            self._graphed = None

    def on_train_start(self) -> None:
        """If the run resumes, set this command's hyperparameters, and its schedule to this step."""
        step = self.trainer.global_step
        if step == 0:
            return
        scheduler: Any = self.lr_schedulers()
        for group, values in zip(
            scheduler.optimizer.param_groups, self._groups, strict=True
        ):
            group.update(values)
        for _ in range(step):  # 2 us each
            scheduler.step()

    def on_train_epoch_start(self) -> None:
        """Seed torch's global generators, from which dropout draws."""
        epoch = self.trainer.current_epoch
        rank = self.trainer.global_rank
        torch.manual_seed(stream_seed(MODEL, self.cfg.seed, epoch, rank))
