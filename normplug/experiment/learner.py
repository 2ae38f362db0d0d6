"""The LightningModule: steps, optimizer, learning-rate schedule, and what a run is judged by."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from normplug._swap.inventory import Inventory
from normplug.experiment.callbacks import say, variance_loggers
from normplug.experiment.config import WHO
from normplug.experiment.data import MODEL, Batch, stream_seed
from normplug.experiment.graph import GraphedLoss
from normplug.experiment.measure import ACCURACY, Measure
from normplug.experiment.models import GPT, Block, heads

DROP_TOKENS = 2**15  # test tokens, per process, on which the loss without each block is measured


def make_optimizer(net: nn.Module, cfg: DictConfig) -> Optimizer:
    """Norms and the head get the `factors` of their own. Of the others, only matrices decay."""
    own: dict[Tensor, Mapping[str, float]] = {
        p: cfg.factors["norm_bias" if name.endswith("bias") else "norm_weight"]
        for norm in Inventory(net).norms
        for name, p in norm.named_parameters()
    }
    own |= {head.weight: cfg.factors["head"] for head in heads(net)}
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for p in filter(lambda p: p.requires_grad, net.parameters()):
        of_p = own.get(p, {"lr": 1.0, "decay": float(p.dim() > 1)})
        groups.setdefault((of_p["lr"], of_p["decay"]), []).append(p)
    make = instantiate(cfg.optimizer, _convert_="all")  # checkpoints have plain lists only
    optimizer: Optimizer = make([{"params": params} for params in groups.values()])
    for group, (rate, decay) in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] *= rate
        group["weight_decay"] = decay * group.get("weight_decay", 0.0)
    return optimizer


def make_scheduler(
    optimizer: Optimizer, steps: int, name: str, warmup: float, cycle_momentum: bool = False
) -> lr_scheduler.LRScheduler:
    """Return a schedule of `steps` optimizer steps, whose peaks are the optimizer's learning rates.

    It is "one_cycle" (Smith 2018, arXiv:1803.09820; below 4 steps "cosine"), or a linear warm-up
    followed by "cosine" annealing to 0 or a "constant" rate. In the fraction `warmup` of all steps
    the learning rate rises. With `cycle_momentum`, "one_cycle" moves the momentum, or Adam's first
    beta, from 0.95 to 0.85 and back, whatever the optimizer's own is.
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


class Diverged(RuntimeError):
    """The loss became NaN or infinite, in the forward of the optimizer step `step`."""

    step: int


class Learner(LightningModule):
    """Train `net` to predict classes: the label of an image, or the next token.

    A run that resumes takes the weights, the optimizer's moments and the step from its checkpoint.
    Its hyperparameters come from its own command. If it has more epochs than the earlier run, its
    learning rate continues on the schedule of the new total. `cfg` has the keys of
    configs/train.yaml. `identity` distinguishes the run; checkpoints store it as "run".
    """

    def __init__(
        self, net: nn.Module, measure: Measure, cfg: DictConfig, identity: dict[str, Any]
    ) -> None:
        super().__init__()
        self.net = net
        self.measure = measure
        self._test_key, self._curve_key, _ = measure.keys
        self.cfg = cfg
        self.identity = identity
        self.scores_by_epoch: list[float] = []  # on the validation part
        self._dropped_tokens = 0  # of the test, on which blocks are dropped

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.net(inputs)
        return getattr(outputs, "logits", outputs)  # of a ModelOutput of transformers

    def loss(self, inputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy over all targets."""
        logits = self(inputs).flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten(), label_smoothing=label_smoothing)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        step: int = self.trainer.global_step
        is_measured = any(each.logged_step == step for each in variance_loggers(self.trainer))
        if self._graphed is None or is_measured:
            loss = self._smoothed(*batch)
        else:
            loss = self._graphed(*batch)
        # Each call of `log` costs the host as much as dozens of launches, and a value for the bar
        # makes it wait for the GPU. So it is called only where the value is written or displayed.
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._is_logged = batch_idx == 0 or self.trainer.is_last_batch
        self._is_logged |= every > 0 and (step + 1) % every == 0
        self._losses += loss.detach().float()
        self._steps += 1
        if self._is_logged:
            bar = self.trainer.progress_bar_callback is not None
            self.log("train/loss", loss, prog_bar=bar)
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        """Stop, in every process, before the optimizer uses a loss that is not finite."""
        # On a GPU, only a logged loss is read: the host waits for it anyway.
        if self._is_logged or self.device.type == "cpu":
            total = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="sum")
            self._check_finite("training", total)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and measure on the test part; on its first tokens, drop each block of a GPT."""
        self._evaluate("test", batch)
        if not isinstance(self.net, GPT) or self._dropped_tokens >= DROP_TOKENS:
            return
        targets = batch[1]
        self._dropped_tokens += targets.numel()
        self.log_mean("block_drop/none", self.loss(*batch), len(targets), logger=False)
        for number, block in enumerate(self.net.blocks):
            assert isinstance(block, Block)
            with block.dropped():
                loss = self.loss(*batch)
            self.log_mean(f"block_drop/{number}", loss, len(targets), logger=False)

    def log_mean(self, name: str, value: Tensor, samples: int, **options: Any) -> None:
        """Log the mean of a batch, to be averaged over the samples of all batches and processes."""
        # Lightning divides the processes' mean sum by their mean count, which it rounds down.
        # Multiplied by the number of processes, the mean count is a whole number.
        count = samples * self.trainer.world_size
        self.log(name, value, sync_dist=True, batch_size=count, **options)

    def on_validation_epoch_end(self) -> None:
        """Store the epoch's score for the report; stop if the mean loss is not finite."""
        self._check_finite("validation", self.trainer.callback_metrics["val/loss"])
        if not self.trainer.sanity_checking:
            self.scores_by_epoch.append(self.score("val"))
            self._say_epoch()

    def on_test_epoch_end(self) -> None:
        self._check_finite("test", self.trainer.callback_metrics["test/loss"])

    def score(self, stage: str) -> float:
        """The latest value of the measure; `stage` is "val" or "test"."""
        return float(self.trainer.callback_metrics[f"{stage}/{self.measure.name}"])

    def result(self) -> dict[str, Any]:
        """The task's part of `result.json`; of a GPT, the test loss without each block too."""
        values: dict[str, Any] = {
            "measure": asdict(self.measure),
            self._test_key: self.score("test"),
            self._curve_key: self.scores_by_epoch,
        }
        metrics = self.trainer.callback_metrics
        losses = [float(metrics[name]) for name in metrics if name.startswith("block_drop/")]
        if losses:
            drop = {"tokens": self._dropped_tokens, "loss": losses[0], "loss_without": losses[1:]}
            values["block_drop"] = drop
        return values

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.net, self.cfg)
        steps = int(self.trainer.estimated_stepping_batches)
        how = (self.cfg.schedule, self.cfg.warmup, self.cfg.cycle_momentum)
        scheduler = make_scheduler(optimizer, steps, *how)
        self._groups = [dict(group) for group in optimizer.param_groups]
        if getattr(self.trainer.precision_plugin, "scaler", None) is None:
            # There is nothing to unscale; else Lightning would not clip for a fused optimizer.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["run"] = self.identity
        checkpoint[self._curve_key] = list(self.scores_by_epoch)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the values; drop the schedule's state, which `on_train_start` recomputes."""
        for key, own in self.identity.items():
            if (other := checkpoint["run"].get(key)) != own:
                raise ValueError(f"it has {key} {other!r}, this run has {own!r}")
        if not checkpoint["optimizer_states"]:
            raise ValueError("it lacks the optimizer")
        epochs, limit = checkpoint["epoch"] + 1, self.trainer.max_epochs
        if limit is not None and 0 <= limit < epochs:
            raise ValueError(f"it has {epochs} epochs, more than trainer.max_epochs={limit}")
        # A run that has trained tests its best checkpoint, which may be of an earlier epoch.
        self.scores_by_epoch = self.scores_by_epoch or list(checkpoint[self._curve_key])
        checkpoint["lr_schedulers"] = []

    def on_fit_start(self) -> None:
        self._smoothed = partial(self.loss, label_smoothing=self.cfg.label_smoothing)
        self._graphed = GraphedLoss(self._smoothed, self.net) if self.cfg.graph else None

    def on_fit_end(self) -> None:
        """Free the graphs: the model moves to the host next, and they read its old addresses."""
        if self._graphed is not None:
            self._graphed.release()
            self._graphed = None

    def on_train_start(self) -> None:
        """If the run resumes, set this command's hyperparameters, and its schedule to this step."""
        self._begun, self._first = time.perf_counter(), self.trainer.current_epoch
        step = self.trainer.global_step
        if step == 0:
            return
        scheduler: Any = self.lr_schedulers()
        for group, own in zip(scheduler.optimizer.param_groups, self._groups, strict=True):
            group.update(own)
        for _ in range(step):  # 2 us each
            scheduler.step()

    def on_train_epoch_start(self) -> None:
        """Seed torch's global generators, from which dropout draws; start the mean loss."""
        self._losses, self._steps = torch.zeros((), device=self.device), 0
        epoch, rank = self.trainer.current_epoch, self.trainer.global_rank
        torch.manual_seed(stream_seed(MODEL, self.cfg.seed, epoch, rank))

    def _say_epoch(self) -> None:
        """Print a line, in place of a progress bar that would flood a log."""
        done, total = self.trainer.current_epoch + 1, self.trainer.max_epochs or -1  # -1: no limit
        words = [
            f"epoch {done:3d}" + (f" of {total}" if total > 0 else ""),
            f"training loss {float(self._losses) / self._steps:.4f}",
            f"validation {self.measure.name} {self.measure.text(self.scores_by_epoch[-1])}",
            f"lr {self.trainer.optimizers[0].param_groups[0]['lr']:.2g}",
        ]
        if done < total:
            each = (time.perf_counter() - self._begun) / (done - self._first)
            words.append(f"{timedelta(seconds=round(each * (total - done)))} left")
        say("  ".join(words))

    def _check_finite(self, name: str, loss: Tensor) -> None:
        if torch.isfinite(loss):
            return
        step, epoch = self.trainer.global_step, self.trainer.current_epoch
        error = Diverged(
            f"{WHO}: the {name} loss is {float(loss)} at step {step} (epoch "
            f"{epoch + (name != 'test')}). Lower optimizer.lr, clip with "
            "trainer.gradient_clip_val=1, or find the operation with +trainer.detect_anomaly=true."
        )
        error.step = step
        raise error

    def _evaluate(self, stage: str, batch: Batch) -> None:
        inputs, targets = batch
        logits = self(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        self.log_mean(f"{stage}/loss", loss, len(targets))
        if self.measure == ACCURACY:
            accuracy = (logits.argmax(-1) == targets).float().mean()
            self.log_mean(f"{stage}/accuracy", accuracy, len(targets), prog_bar=True)
