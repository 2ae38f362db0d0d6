"""One run of train.py: its directory, its Trainer, and the `result.json` that it leaves."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

import normplug
from normplug import _convert
from normplug._fuse.fuse import fused_modules
from normplug._results import stamp
from normplug.experiment.callbacks import (
    StepTimer,
    ask_seldom,
    log,
    report,
    say,
    variance_lines,
    variance_loggers,
)
from normplug.experiment.config import arm_name, check
from normplug.experiment.data import Source
from normplug.experiment.errors import WHO, UserError, user_sentence
from normplug.experiment.graph import refuse_graph
from normplug.experiment.learner import Diverged, Learner
from normplug.experiment.measure import BASELINE, REFUSAL, RESULT, Measure
from normplug.experiment.resume import Checkpoints, RunDirectory
from normplug.experiment.sweep import is_sweep

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


def task(train: Callable[[DictConfig, Run], None]) -> Callable[[DictConfig], float | None]:
    """Decorate `train(cfg, run)`: skip a run that has finished, and record how a run ends.

    The decorated function returns the last validation score, the objective of a search over
    hyperparameters. See `Run.stopped` for what it raises.
    """

    @functools.wraps(train)
    def wrapper(cfg: DictConfig) -> float | None:
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        gc.collect()  # objects of a sweep's previous run form cycles, and may hold GPU memory
        run = Run(cfg)
        try:
            if not run.has_finished():
                train(cfg, run)
            curve = run.result.get(Measure.of(run.result).curve_key)
            return curve[-1] if curve else None
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            run.stopped(error)
            return None
        finally:
            run.place.lock.release()

    return wrapper


class Run:
    """One run of a configuration, in Hydra's output directory.

    Attributes:
        result: the content of `result.json`; {} before the training begins.
        labels: the keys of `result` that name the run, and that `normplug.compare --best` reads.
        gpu: whether the Trainer will use a GPU.
        fuses: whether swapped norms are fused: the key `fuse`, or `gpu` if that is null.
        checkpoint: the file that the run resumes from or tests; None before `begin`, or for none.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.directory = Path(HydraConfig.get().runtime.output_dir)
        self.place = RunDirectory(self.directory, cfg)
        self.result: dict[str, Any] = {}
        self.checkpoint: Path | None = None
        # A key whose interpolation fails is None here: `check` refuses it.
        find = functools.partial(OmegaConf.select, cfg, throw_on_resolution_failure=False)
        kinds = ("auto", "gpu", "cuda")
        self.gpu = torch.cuda.is_available() and find("trainer.accelerator") in kinds
        self.fuses = self.gpu if find("fuse") is None else cfg.fuse
        choices = HydraConfig.get().runtime.choices
        data = str(choices.get("data"))
        rate = find("optimizer.lr")
        path = find({"image_folder": "data.root", "text": "data.path"}.get(data, "none"))
        self.labels: dict[str, Any] = {
            "arm": arm_name(*map(find, ("mode", "gamma0", "tag"))),
            "seed": find("seed"),
            "model": find("model.name") or choices.get("model"),
            "data": Path(str(path)).name if path else data,
            "learning_rate": rate if isinstance(rate, (int, float)) else None,
            "overrides": list(HydraConfig.get().overrides.task),
        }
        self._timer = StepTimer()

    def has_finished(self) -> bool:
        """Lock the directory and check the configuration; return whether its result is there.

        Raises:
            UserError: a live run owns the directory; the configuration cannot run; the directory
                has another configuration's result, or a damaged one.
        """
        self.place.take()
        check(self.cfg)
        unfused = self.cfg.compile or not self.fuses
        if self.cfg.recompute and self.cfg.mode != BASELINE and unfused:
            raise UserError(
                f"{WHO}: recompute=true is for fused norms (fuse=true, or null on a GPU) without "
                "compile=true: the compiler decides by itself what to recompute."
            )
        former = self.place.finished_result()
        (self.directory / REFUSAL).unlink(missing_ok=True)
        if former is None:
            return False
        self.result = former
        say(f"skipped: {self.directory} is finished")
        return True

    def trainer(self) -> Trainer:
        """Build the Trainer with its callbacks and loggers, and set its keys that are "auto".

        Raises:
            UserError: a sweep with a strategy that would repeat the sweep in every process, or
                `graph=true` in a run that cannot use it.
        """
        settings = self.cfg.trainer.copy()
        groups = (self.cfg.get(group) or {} for group in ("logger", "callbacks"))
        loggers, callbacks = (
            [instantiate(node) for node in group.values() if node is not None] for group in groups
        )
        if not loggers:  # LearningRateMonitor raises without a logger
            callbacks = [c for c in callbacks if not isinstance(c, LearningRateMonitor)]
        auto = {
            "precision": "bf16-mixed" if self.gpu else "32-true",
            "enable_progress_bar": sys.stdout.isatty() and not is_sweep(),
            "enable_checkpointing": any(isinstance(c, Checkpoint) for c in callbacks),
        }
        settings.update({k: value for k, value in auto.items() if settings.get(k) == "auto"})
        plugins = [*(instantiate(settings.get("plugins")) or ()), Checkpoints()]
        trainer = instantiate(
            settings, callbacks=[*callbacks, self._timer], logger=loggers, plugins=plugins
        )
        launcher = trainer.strategy.launcher
        reruns = launcher is not None and not launcher.is_interactive_compatible
        if is_sweep() and reruns and trainer.num_devices > 1:
            raise UserError(
                f"{WHO}: {trainer.num_devices} devices with {type(trainer.strategy).__name__} "
                "start each process by running the command again, and with -m that is the whole "
                "sweep. Set trainer.devices=1, run the arms one by one, or use torchrun."
            )
        if self.cfg.graph:
            refuse_graph(trainer)
        ask_seldom(trainer)
        return trainer

    def begin(self, trainer: Trainer) -> str | None:
        """Record that the run trains now; return the checkpoint that it resumes from or tests.

        Raises:
            UserError: there is no such checkpoint.
        """
        self.checkpoint = self.place.make_room()
        self._write(status="running", process=f"{os.getpid()} on {socket.gethostname()}")
        values = self.labels | {"config": OmegaConf.to_container(self.cfg, resolve=True)}
        for logger in trainer.loggers:
            # config.yaml is beside the files of a CSVLogger; for TensorBoard, see `report`.
            if not isinstance(logger, (CSVLogger, TensorBoardLogger)):
                logger.log_hyperparams(values)
        say(f"{self.directory}")
        if self.checkpoint is None:
            return None
        say(f"{'resuming' if self.cfg.train else 'testing'}: {self.checkpoint}")
        return str(self.checkpoint)

    def finish(self, trainer: Trainer, model: Learner, data: Source) -> None:
        """Write the result, and print a summary."""
        gpu = trainer.strategy.root_device.type == "cuda"  # the model itself is back on the CPU
        fusions = normplug.fusions(model) if fused_modules(model) else ()
        fused = sum(row.label is not None for row in fusions)
        layers = dict(_convert.normplug_layers(model))
        step_ms = self._timer.median_ms()
        items = data.items_per_batch * trainer.world_size
        # In a pre-norm model, the variances of the residual stream by depth.
        rows = [row for logger in variance_loggers(trainer) for row in logger.last]
        variances = {r.layer: r.input_variance for r in rows if math.isfinite(r.input_variance)}
        self._write(
            **model.result(),
            **data.facts(model.score("test")),
            **{"step_ms": step_ms, model.measure.speed_key: step_ms and items * 1e3 / step_ms},
            # On the host, the peak of a process would include the earlier runs of a sweep.
            peak_memory_bytes=torch.cuda.max_memory_allocated() if gpu else None,
            norms_swapped=len(layers),
            target_variances={path: layer.target_variance for path, layer in layers.items()},
            input_variances=variances,
            norms_fused=fused,
            recompute=self.cfg.recompute and fused > 0,
            channels_last=self.cfg.channels_last,
            graph=self.cfg.graph,
            epochs=trainer.current_epoch,
            precision=str(trainer.precision),
            status="finished",
            gpus=trainer.world_size * gpu,
        )
        report(trainer, self.labels, self.result)
        self._say_summary(model, variance_lines(trainer))

    def _write(self, *, gpus: int = 0, **values: Any) -> None:
        versions = stamp(gpus > 0, "scikit-learn", gpus=max(gpus, 1))
        where = {key: versions.pop(key) for key in ("date", "commit")}
        where["hardware"] = versions.pop("device")
        self.result = self.labels | self.result | values | where
        self.result["versions"] = versions
        if self.result["status"] != "running":
            self.result.pop("process", None)
        self.place.write(RESULT, json.dumps(self.result, indent=2) + "\n")

    def _say_summary(self, model: Learner, variances: dict[str, str]) -> None:
        r, measure = self.result, model.measure
        peak, speed, epochs = r["peak_memory_bytes"], r[measure.speed_key], r["epochs"]
        files = (f"{p.name}/" if p.is_dir() else p.name for p in self.directory.glob("[!.]*"))
        titled = {
            **model.headlines(),
            "trained": f"{epochs} epoch{'s' * (epochs != 1)}" if self.cfg.train else "",
            "speed": "not timed: too few steps",
            "peak GPU memory": f"{peak / 2**20:,.0f} MiB" if peak else "",
            "norm layers": f"{r['norms_swapped']} swapped, {r['norms_fused']} fused",
            **variances,
            "written to": f"{self.directory}: {', '.join(sorted(files))}",
        }
        if speed is not None:
            titled["speed"] = f"{speed:,.0f} {measure.items}/s ({r['step_ms']:.2f} ms a step)"
        say(f"\n{r['model']} on {r['data']}, arm {r['arm']}, seed {r['seed']}: {r['hardware']}")
        say("\n".join(f"{title:<19}  {text}" for title, text in titled.items() if text))

    def stopped(self, error: BaseException) -> None:
        """Record what stopped the run. A sweep goes on after an error.

        Raises:
            SystemExit: after a signal, with exit code 128 plus its number; in a single run, after
                an error with a message for the user, which is printed to stderr.
            Exception: in a single run, any other error.
        """
        outcome: dict[str, Any] = {"status": "failed"}
        if isinstance(error, Diverged):
            outcome = {"status": "diverged", "step": error.step}
        sentence, code = user_sentence(error, self.checkpoint), 1
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            signum = signal.SIGTERM if isinstance(error, SIGTERMException) else signal.SIGINT
            outcome, code = {"status": "interrupted"}, 128 + signum
            advice = f"Go on with the same command and hydra.run.dir={self.directory}"
            if is_sweep():
                advice = "The same sweep skips what has finished and resumes this run"
            sentence = f"interrupted: {self.directory}: {signum.name}. {advice}."
        text = sentence or f"{type(error).__name__}: {error}"
        if self.result or (is_sweep() and self.place.lock.is_locked):
            self._record(**outcome, error=text)
        if is_sweep() and code == 1:
            if not sentence:
                traceback.print_exception(error)
            log.error(f"{outcome['status']}: {self.directory}: {' '.join(text.split())}")
            return
        if not sentence:
            raise error
        print(sentence, file=sys.stderr)
        raise SystemExit(code) from None

    def _record(self, **outcome: Any) -> None:
        with contextlib.suppress(OSError, UserError):  # a full disk, a damaged result.json
            if self.place.result().get("status") == "finished":  # it stays
                self.place.write(REFUSAL, outcome["error"])
            else:
                self._write(**outcome)
