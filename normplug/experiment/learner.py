"""The LightningModule: steps and their CUDA graphs, optimizer, schedule, and what is reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from normplug._ops import exchange
from normplug._swap.inventory import Inventory
from normplug.compare.measure import ACCURACY, Measure
from normplug.experiment.callbacks import say, variance_loggers
from normplug.experiment.config import WHO, UserError
from normplug.experiment.data import MODEL, Batch, stream_seed
from normplug.experiment.models import GPT, Block, heads
from normplug.modules import SyncBatchNorm

Loss = Callable[[Tensor, Tensor], Tensor]
DROP_TOKENS = (
    2**15
)  # test tokens, per process, on which the loss without each block is measured


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
    make = instantiate(
        cfg.optimizer, _convert_="all"
    )  # checkpoints have plain lists only
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


class GraphedLoss:
    """A training loss whose forward and backward are replayed as CUDA graphs.

    `torch.cuda.make_graphed_callables` captures them as one autograd node: the rest of Lightning's
    optimisation works as usual, and `DistributedDataParallel` averages gradients after each replay.

    The first call captures the graphs, which changes no buffer and no random state. From then on,
    weights and buffers must keep their addresses. Inputs of another shape run without a graph. In
    several processes, all must capture at the same step: SyncBatchNorms exchange statistics.
    """

    def __init__(self, loss: Loss, net: nn.Module) -> None:
        self._loss = loss
        self._net = net
        self._step: _Step | None = None  # None until it is captured
        self._shapes: tuple[torch.Size, ...] = ()
        self._peers: set[exchange.Peers] = set()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss; the next call overwrites its memory."""
        shapes = (inputs.shape, targets.shape)
        if self._step is None:
            self._peers = _peers_of(self._net, inputs.device)
            self._step, self._shapes = self._capture(inputs, targets), shapes
        for each in self._peers:
            each.check()  # layers do it too, but a replayed graph calls none
        return (self._step if shapes == self._shapes else self._loss)(inputs, targets)

    def _capture(self, *batch: Tensor) -> _Step:
        step, device = _Step(self._loss, self._net), batch[0].device
        buffers = [(buffer, buffer.clone()) for buffer in self._net.buffers()]
        random = torch.cuda.get_rng_state(device)
        static = tuple(tensor.clone() for tensor in batch)
        torch.cuda.make_graphed_callables(step, static, allow_unused_input=True)
        for buffer, values in buffers:
            buffer.copy_(values)
        torch.cuda.set_rng_state(random, device)
        # Nodes of the captured autograd graph are bound to the capture stream. If they were kept,
        # each gradient would wait for that stream.
        step.output.detach_()
        del step.output
        return step

    def release(self) -> None:
        if self._step is not None:
            vars(self._step).pop("forward")  # breaks a reference cycle, on torch < 2.15
            self._step = None


class _Step(nn.Module):
    """The loss as a module: `make_graphed_callables` gives gradients to a module's parameters."""

    def __init__(self, loss: Loss, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.output = self.loss(inputs, targets)
        return self.output


def _peers_of(net: nn.Module, device: torch.device) -> set[exchange.Peers]:
    """The processes with which the layers of `net` join their batches inside the kernels."""
    found = set()
    for path, layer in net.named_modules():
        if not isinstance(layer, nn.SyncBatchNorm):
            continue
        others = None  # torch's own layer sends collectives
        if isinstance(layer, SyncBatchNorm):
            group = layer.group_to_join()
            if group is None:
                continue
            others = exchange.of(group, device)
        if others is None:
            raise UserError(
                f"{WHO}: graph=true needs processes that exchange statistics inside the kernels, "
                f"but {path} sends collectives. Leave graph=true out."
            )
        found.add(others)
    return found


def refuse_graph(trainer: Trainer) -> None:
    """Refuse `graph=true` for a Trainer that cannot use it: the graphs overwrite the gradients."""
    device, processes = trainer.strategy.root_device, trainer.world_size
    batches = trainer.accumulate_grad_batches
    averages = processes == 1 or isinstance(trainer.strategy, DDPStrategy)
    if device.type == "cuda" and averages and batches == 1:
        return
    raise UserError(
        f"{WHO}: graph=true needs an NVIDIA GPU, trainer.accumulate_grad_batches=1, and in several "
        f"processes trainer.strategy=ddp; this run is on {device}, accumulates {batches}, and has "
        f"{type(trainer.strategy).__name__} in {processes}. Leave graph=true out."
    )


class Diverged(RuntimeError):
    """The loss became NaN or infinite, in the forward of the optimizer step `step`."""

    step: int


class Learner(LightningModule):
    """Train `net` to predict classes: the label of an image, or the next token.

    A run that resumes takes the weights, the optimizer's moments and the step from its checkpoint;
    the rest, such as the schedule and its length, from its own command. `cfg` has the keys of
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

    def loss(
        self, inputs: Tensor, targets: Tensor, label_smoothing: float = 0.0
    ) -> Tensor:
        """The mean cross-entropy over all targets."""
        logits = self(inputs).flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten(), label_smoothing=label_smoothing)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        step: int = self.trainer.global_step
        is_measured = any(
            each.logged_step == step for each in variance_loggers(self.trainer)
        )
        graphed = None if is_measured else self._graphed
        loss = (graphed or self._smoothed)(*batch)
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
        """Store and print the epoch's score; stop if the mean loss is not finite."""
        self._check_finite("validation", self.trainer.callback_metrics["val/loss"])
        if self.trainer.sanity_checking:
            return
        self.scores_by_epoch.append(self.score("val"))
        done, total = (
            self.trainer.current_epoch + 1,
            self.trainer.max_epochs or -1,
        )  # -1: no limit
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
        losses = [
            float(metrics[name]) for name in metrics if name.startswith("block_drop/")
        ]
        if losses:
            drop = {
                "tokens": self._dropped_tokens,
                "loss": losses[0],
                "loss_without": losses[1:],
            }
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
            raise ValueError(
                f"it has {epochs} epochs, more than trainer.max_epochs={limit}"
            )
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
        for group, own in zip(
            scheduler.optimizer.param_groups, self._groups, strict=True
        ):
            group.update(own)
        for _ in range(step):  # 2 us each
            scheduler.step()

    def on_train_epoch_start(self) -> None:
        """Seed torch's global generators, from which dropout draws; start the mean loss."""
        self._losses, self._steps = torch.zeros((), device=self.device), 0
        epoch, rank = self.trainer.current_epoch, self.trainer.global_rank
        torch.manual_seed(stream_seed(MODEL, self.cfg.seed, epoch, rank))

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
