"""What surrounds a training: the run's directory, its failures, and its `result.json`."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import math
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich
import torch
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf
from rich.syntax import Syntax
from rich.tree import Tree

import normplug
from normplug import _convert
from normplug._files import stamp, write_file
from normplug._measure import METRICS, RESULT, VARIANCE, Measure
from normplug.experiment.callbacks import (
    BlockDrop,
    Diverged,
    Scores,
    StepTimer,
    metric,
    variance_lines,
    variance_loggers,
)
from normplug.experiment.config import (
    arm_name,
    check,
    fuses_norms,
    model_name,
    value_of,
)
from normplug.experiment.errors import PLACE, WHO, UserError, user_sentence

CONFIG = "config.yaml"
LOCK = ".lock"
FORMER = "former"
LAST = Path("checkpoints", "last.ckpt")  # in a run's directory
# What a run writes besides its result.
PRODUCTS = (METRICS, VARIANCE, "variance.png", "checkpoints", "tensorboard", CONFIG)
# Keys that may differ between two starts of the same run.
FREE: dict[str, Any] = {"ckpt_path": None, "tags": [], "extras": None}
# The score of a run without one, by the direction of a search. Optuna refuses nan.
WORST = {"minimize": math.inf, "maximize": -math.inf}
# Warnings that a user of train.py cannot act on.
QUIET = (
    ".*does not have many workers",  # the data is in memory: workers would only copy them
    "Experiment logs directory .* exists and is not empty",  # Hydra's own files are in it
    "Checkpoint directory .* exists and is not empty",  # a run that resumes in its own directory
    "Be aware that when using `ckpt_path`, callbacks used",  # of the run that is tested
    "The number of training batches .* is smaller than the logging interval",
    "The dirpath has changed",  # a run that resumes in another directory
    ".*LeafSpec.* is deprecated",  # how Lightning uses torch
    "The AccumulateGrad node's stream does not match",  # Lightning wraps with DDP in a side stream
    "The epoch parameter in `scheduler.step",  # torch's own SequentialLR, before torch 2.10
    "Detected call of `lr_scheduler.step",  # of a resumed run, whose optimizer took these steps
)

log = logging.getLogger(WHO)
say = rank_zero_only(log.info)  # to the console and to train.log
write = rank_zero_only(write_file)


class Run:
    """One run of a configuration in Hydra's output directory, where nothing is ever removed.

    Attributes:
        result: The content of `result.json`; {} before the training starts.
        scores, timer, block_drop: The callbacks from which the result is made.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        self.directory = Path(HydraConfig.get().runtime.output_dir)
        # What makes a run the same one. Unresolved, it names no directory: a run may be moved.
        self.config = OmegaConf.to_yaml(OmegaConf.merge(cfg, FREE))
        # Held by rank 0; the operating system releases it if the process is killed.
        self.lock = FileLock(str(self.directory / LOCK), timeout=0)
        self.labels = labels_of(cfg)
        self.result: dict[str, Any] = {}
        self.scores: Scores | None = None
        self.timer = StepTimer()
        self.block_drop = BlockDrop()
        self._owns_result = False  # whether `result.json` is this run's to write

    def has_finished(self) -> bool:
        """Lock the directory and check the configuration; return whether its result is there."""
        self._take()
        former = self._former()
        self._owns_result = former.get("status") != "finished"
        check(self.cfg, fuses_norms(self.cfg))
        if self._owns_result:
            return False
        if not self._has_same_config():
            raise UserError(
                f"{WHO}: {self.directory} holds a finished run with another {CONFIG}. Name this "
                "one: study=NAME (a directory of its own) or tag=NAME (an arm of its own)."
            )
        self.result = former
        say(f"skipped: {self.directory} is finished")
        return True

    @rank_zero_only
    def _take(self) -> None:
        try:
            self.lock.acquire()
        except Timeout:
            raise UserError(
                f"{WHO}: {self.directory} belongs to a run that is still running, since "
                f"{self._former().get('date')}. Wait until it ends, or give this run its own "
                f"directory: {PLACE}."
            ) from None
        there = [name for name in (RESULT, *PRODUCTS) if (self.directory / name).exists()]
        if there and not self._former():
            raise UserError(
                f"{WHO}: {self.directory} has {', '.join(there)}, but not the result of a run, so "
                f"they are left unchanged. Choose another directory: {PLACE}."
            )

    def _former(self) -> dict[str, Any]:
        """The result of a run that is in the directory; {} for none."""
        with contextlib.suppress(OSError, ValueError):
            result = json.loads((self.directory / RESULT).read_bytes())
            if isinstance(result, dict) and "status" in result:
                return result
        return {}

    def _has_same_config(self) -> bool:
        path = self.directory / CONFIG
        return path.is_file() and path.read_bytes() == self.config.encode()

    def begin(self, trainer: Trainer) -> str | None:
        """Record that the run trains now; return the checkpoint that it resumes from or tests.

        If this same run has begun here, it is the run's last checkpoint, unless `ckpt_path` names
        another one in this directory. Otherwise it is `ckpt_path`. Files that the run would
        overwrite are set aside.
        """
        checkpoint = self._chosen_checkpoint()
        last = self.directory / LAST
        continues = False
        if checkpoint is not None:
            continues = checkpoint.resolve().parent == last.resolve().parent
        if not continues and last.is_file() and self._has_same_config():
            checkpoint = last
            continues = True
        self._set_aside([METRICS] if continues else PRODUCTS)
        write(self.directory / CONFIG, self.config)
        self._write(
            status="running", config=OmegaConf.to_container(self.cfg, resolve=True)
        )
        for logger in trainer.loggers:
            # config.yaml is next to the files of a CSVLogger.
            if not isinstance(logger, CSVLogger):
                logger.log_hyperparams(self.labels | {"config": self.result["config"]})
        say(str(self.directory))
        if checkpoint is None:
            return None
        say(f"{'resuming' if self.cfg.train else 'testing'}: {checkpoint}")
        return str(checkpoint)

    def _chosen_checkpoint(self) -> Path | None:
        """The path in `ckpt_path`; "last" is the last checkpoint here, or the newest of others."""
        if self.cfg.ckpt_path is None:
            return None
        path = Path(self.cfg.ckpt_path)
        if self.cfg.ckpt_path == "last":
            here = self.directory / LAST
            beside = self.directory.parent.glob(f"*/{LAST}")
            candidates = [here] if here.is_file() else beside
            path = max(candidates, key=lambda path: path.stat().st_mtime, default=path)
        if not path.is_file():
            raise UserError(
                f"{WHO}: ckpt_path must be a checkpoint file; got {path}. A run's checkpoint is "
                f"{LAST} in its directory; ckpt_path=last looks in {self.directory.parent}/*/."
            )
        return path

    @rank_zero_only
    def _set_aside(self, names: Sequence[str]) -> None:
        moves = [name for name in names if (self.directory / name).exists()]
        if not moves:
            return
        folders = self.directory.glob(f"{FORMER}/*")
        numbers = [int(path.name) for path in folders if path.name.isdecimal()]
        aside = self.directory / FORMER / str(1 + max(numbers, default=0))
        aside.mkdir(parents=True)
        for name in moves:
            (self.directory / name).replace(aside / name)
        print(f"set aside: {aside} has the files of an earlier run", file=sys.stderr)

    def finish(
        self, trainer: Trainer, module: LightningModule, data: LightningDataModule
    ) -> None:
        """Write the result, and print a summary."""
        assert self.scores is not None
        measure = self.scores.measure
        test_key, curve_key, speed_key = measure.keys
        score = metric(trainer, f"test/{measure.name}")
        # The model itself is back on the CPU.
        on_gpu = trainer.strategy.root_device.type == "cuda"
        step_ms = self.timer.median_ms()
        items = data.items_per_batch * trainer.world_size  # type: ignore[attr-defined]
        facts = data.facts(score)  # type: ignore[attr-defined]
        values = {
            "measure": asdict(measure),
            test_key: score,
            curve_key: self.scores.by_epoch,
            speed_key: items * 1e3 / step_ms if step_ms else None,
            "step_ms": step_ms,
            "train_seconds_by_epoch": self.timer.seconds_by_epoch(),
            # On the host, the peak of a process would include the earlier runs of a sweep.
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            "channels_last": self.cfg.channels_last,
            "graph": self.cfg.graph,
            "epochs": trainer.current_epoch,
            "precision": str(trainer.precision),
        }
        norms = self._norms(trainer, module)
        drop = self.block_drop.result(trainer)
        self._write(
            gpus=trainer.world_size * on_gpu,
            status="finished",
            **values,
            **norms,
            **drop,
            **facts,
        )
        for logger in trainer.loggers:
            logger.log_metrics({f"hp/{test_key}": score})
            logger.finalize("success")
        say(self._summary(trainer, measure))

    def _norms(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """The part of the result about the norms."""
        layers = dict(_convert.normplug_layers(module))
        fusions = normplug.fusions(module) if _convert.fused_modules(module) else ()
        fused = sum(row.label is not None for row in fusions)
        # In a pre-norm model, the variances of the residual stream by depth.
        rows = [row for logger in variance_loggers(trainer) for row in logger.last]
        variances = {row.layer: row.input_variance for row in rows}
        return {
            "norms_swapped": len(layers),
            "target_variances": {
                path: layer.target_variance for path, layer in layers.items()
            },
            "input_variances": {
                path: value for path, value in variances.items() if math.isfinite(value)
            },
            "norms_fused": fused,
            "recompute": self.cfg.recompute and fused > 0,
        }

    def _summary(self, trainer: Trainer, measure: Measure) -> str:
        r = self.result
        test_key, curve_key, speed_key = measure.keys
        curve = r[curve_key]
        step_ms = r["step_ms"]
        peak = r["peak_memory_bytes"]
        speed = "not timed: too few steps"
        if step_ms:
            speed = f"{r[speed_key]:,.0f} {measure.items}/s ({step_ms:.2f} ms per step)"
        epochs = f"{r['epochs']} epoch{'s' * (r['epochs'] != 1)}"
        paths = sorted(self.directory.glob("[!.]*"))
        files = ", ".join(f"{p.name}/" if p.is_dir() else p.name for p in paths)
        titled = {
            f"validation {measure.name}": measure.text(curve[-1]) if curve else "",
            f"test {measure.name}": measure.text(r[test_key]),
            "trained": epochs if self.cfg.train else "",
            "speed": speed,
            "peak GPU memory": f"{peak / 2**20:,.0f} MiB" if peak else "",
            "norm layers": f"{r['norms_swapped']} swapped, {r['norms_fused']} fused",
            **variance_lines(trainer),
            "written to": f"{self.directory}: {files}",
        }
        head = f"{r['model']} on {r['data']}, arm {r['arm']}, seed {r['seed']}"
        lines = [f"{title:<19}  {text}" for title, text in titled.items() if text]
        return "\n".join([f"\n{head}: {r['hardware']}", *lines])

    def score(self) -> float | None:
        """The last validation score. Without one, the worst value that a search can get, or None.

        A search must get a value for a run that diverged or failed: Optuna's samplers ignore a
        trial without a value, and would draw the same options again.
        """
        validation = validation_of(self.result)
        if validation is not None:
            return validation
        hydra_config: Any = HydraConfig.get()
        direction = OmegaConf.select(hydra_config, "sweeper.direction")
        # The sweeper's own default is an enum.
        return WORST.get(getattr(direction, "name", str(direction)))

    def _write(self, *, gpus: int = 0, **values: Any) -> None:
        """Add values to the result, and write all of it."""
        versions = stamp(gpus > 0, "scikit-learn", gpus=max(gpus, 1))
        self.result = self.labels | self.result | values
        self.result["date"] = versions.pop("date")
        self.result["commit"] = versions.pop("commit")
        self.result["hardware"] = versions.pop("device")
        self.result["versions"] = versions
        write(self.directory / RESULT, json.dumps(self.result, indent=2) + "\n")

    def stop(self, error: BaseException) -> None:
        """Record what stopped the run. Then a sweep goes on, except after a signal.

        A sweep stops too where `result.json` is not this run's to write, or cannot be written.
        """
        code = 1
        outcome: dict[str, Any] = {"status": "failed"}
        restoring = self.scores.restoring if self.scores is not None else None
        sentence = user_sentence(error, restoring)
        if isinstance(error, Diverged):
            outcome = {"status": "diverged", "step": error.step}
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            is_term = isinstance(error, SIGTERMException)
            signum = signal.SIGTERM if is_term else signal.SIGINT
            code = 128 + signum
            outcome = {"status": "interrupted"}
            sentence = f"interrupted: {self.directory}: {signum.name}. {self._advice()}."
        text = sentence or f"{type(error).__name__}: {error}"
        is_recorded = self._owns_result and (bool(self.result) or self.in_sweep)
        if is_recorded:
            try:
                self._write(**outcome, error=text)
            except OSError:  # a full disk
                is_recorded = False
        if self.in_sweep and is_recorded and code == 1:
            if not sentence:
                traceback.print_exception(error)
            words = " ".join(text.split())
            log.error(f"{outcome['status']}: {self.directory}: {words}")
            return
        if not sentence:
            raise error
        print(sentence, file=sys.stderr)
        raise SystemExit(code) from None

    def _advice(self) -> str:
        if self.in_sweep:
            return "The same sweep skips what has finished and resumes this run"
        return f"Resume with the same command and hydra.run.dir={self.directory}"


def labels_of(cfg: DictConfig) -> dict[str, Any]:
    """What names a run, and what `normplug.compare --best` reads."""
    choices = HydraConfig.get().runtime.choices
    value = functools.partial(value_of, cfg)
    data = str(choices.get("data"))
    path = value("data.root" if data == "image_folder" else "data.path")
    rate = value("optimizer.lr")
    model = str(choices.get("model"))
    return {
        "arm": arm_name(value("mode"), value("gamma0"), value("tag")),
        "seed": value("seed"),
        "model": model_name(model, value("model.name"), value("model.arch")),
        "data": Path(str(path)).name if path else data,
        "learning_rate": rate if isinstance(rate, (int, float)) else None,
        "overrides": list(HydraConfig.get().overrides.task),
    }


def validation_of(result: Mapping[str, Any]) -> float | None:
    """The last validation score in a `result.json`; None without one, or before the run's end."""
    curve = result.get(Measure.of(result).keys[1])
    if result.get("status") != "finished" or not curve:
        return None
    return float(curve[-1])


def task_wrapper(
    train: Callable[[DictConfig, Run], None],
) -> Callable[[DictConfig], float | None]:
    """Turn a training into the task of Hydra, which returns the score for a search.

    A run that has finished is skipped. What stops a run is recorded in its `result.json`: a mistake
    gives one sentence, and a sweep goes on with the next run.
    """

    @functools.wraps(train)
    def task(cfg: DictConfig) -> float | None:
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        gc.collect()  # objects of a sweep's previous run form cycles, and may hold GPU memory
        run = Run(cfg)
        try:
            if not run.has_finished():
                apply_extras(cfg, run.in_sweep)
                train(cfg, run)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            run.stop(error)
        finally:
            run.lock.release()
        return run.score()

    return task


def apply_extras(cfg: DictConfig, in_sweep: bool) -> None:
    """Do what `extras` asks for before a training."""
    if cfg.extras.ignore_warnings:
        warnings.filterwarnings("ignore")
    if cfg.extras.print_config and not in_sweep:
        print_config(cfg)


@rank_zero_only
def print_config(cfg: DictConfig) -> None:
    """Print a configuration as a tree, with its interpolations as they are."""
    tree = Tree("config", guide_style="dim")
    for key, value in cfg.items():
        if OmegaConf.is_config(value):
            text = OmegaConf.to_yaml(value).rstrip()
            shown = Syntax(text, "yaml", background_color="default", word_wrap=True)
            tree.add(str(key)).add(shown)
        else:
            tree.add(OmegaConf.to_yaml({key: value}).rstrip())
    rich.print(tree)
