"""One run of train.py: from its command line to the `result.json` that it leaves."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

import normplug
from normplug import _convert
from normplug._files import stamp, write_file
from normplug.compare.measure import METRICS, RESULT, VARIANCE, Measure
from normplug.experiment import callbacks
from normplug.experiment.callbacks import say
from normplug.experiment.config import (
    CHOICES,
    PLACE,
    WHO,
    UserError,
    arm_name,
    check,
    model_name,
    unnamed_keys,
    user_sentence,
)
from normplug.experiment.data import Source
from normplug.experiment.learner import Diverged, Learner, refuse_graph
from normplug.experiment.models import apply_arm

# The packed copy of a wheel, or the directory of a checkout.
PLACES = Path(__file__).with_name("configs"), Path(__file__).parents[2] / "configs"
CONFIGS = str(next(filter(Path.is_dir, PLACES)))
SHOWS_ALL = "HYDRA_FULL_ERROR" in os.environ  # Hydra's setting for whole tracebacks

CONFIG = "config.yaml"
LOCK = ".lock"
FORMER = "former"
LAST = Path("checkpoints", "last.ckpt")  # in a run's directory
# What a run writes besides its result.
PRODUCTS = (METRICS, VARIANCE, "variance.png", "checkpoints", "tensorboard", CONFIG)
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

# The score of a run without one, by the direction of a search. Optuna refuses nan.
WORST = {"minimize": math.inf, "maximize": -math.inf}

write = rank_zero_only(write_file)


class Run:
    """One run of a configuration in Hydra's output directory, where nothing is ever removed."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        self.directory = Path(HydraConfig.get().runtime.output_dir)
        # What makes a run the same one: all but its checkpoint. Unresolved, it names no directory.
        self.config = OmegaConf.to_yaml(OmegaConf.merge(cfg, {"ckpt_path": None}))
        # Held by rank 0; the operating system releases it if the process is killed.
        self.lock = FileLock(str(self.directory / LOCK), timeout=0)
        self.result: dict[
            str, Any
        ] = {}  # of `result.json`, from the start of the training on
        self.checkpoint: Path | None = None  # that `begin` resumes from or tests
        # A key whose interpolation fails is None here: `check` refuses it.
        find = functools.partial(OmegaConf.select, cfg, throw_on_resolution_failure=False)
        accelerator = find("trainer.accelerator")
        self.gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        self.fuses = self.gpu if find("fuse") is None else cfg.fuse
        choices = HydraConfig.get().runtime.choices
        data, rate = str(choices.get("data")), find("optimizer.lr")
        path = find({"image_folder": "data.root", "text": "data.path"}.get(data, "none"))
        # What names the run, and what `normplug.compare --best` reads.
        self.labels: dict[str, Any] = {
            "arm": arm_name(*map(find, ("mode", "gamma0", "tag"))),
            "seed": find("seed"),
            "model": model_name(
                str(choices.get("model")), find("model.name"), find("model.arch")
            ),
            "data": Path(str(path)).name if path else data,
            "learning_rate": rate if isinstance(rate, (int, float)) else None,
            "overrides": list(HydraConfig.get().overrides.task),
        }
        self._records = False  # whether `result.json` is this run's to write
        self._timer = callbacks.StepTimer()

    def has_finished(self) -> bool:
        """Lock the directory and check the configuration; return whether its result is there."""
        self._take()
        former = self._former()
        self._records = former.get("status") != "finished"
        check(self.cfg, self.fuses)
        if self._records:
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
        found = [name for name in (RESULT, *PRODUCTS) if (self.directory / name).exists()]
        if found and not self._former():
            raise UserError(
                f"{WHO}: {self.directory} has {', '.join(found)}, but not the result of a run, so "
                f"they stay as they are. Choose another directory: {PLACE}."
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

    def trainer(self) -> Trainer:
        """Build the Trainer with its callbacks and loggers, and set its keys that are "auto"."""
        settings = self.cfg.trainer.copy()
        groups = (self.cfg.get(group) or {} for group in ("logger", "callbacks"))
        loggers, observers = (
            [instantiate(node) for node in group.values() if node is not None]
            for group in groups
        )
        if not loggers:  # LearningRateMonitor raises without a logger
            observers = [c for c in observers if not isinstance(c, LearningRateMonitor)]
        auto = {
            "precision": "bf16-mixed" if self.gpu else "32-true",
            "enable_progress_bar": sys.stdout.isatty() and not self.in_sweep,
            "enable_checkpointing": any(isinstance(c, Checkpoint) for c in observers),
        }
        settings.update(
            {k: value for k, value in auto.items() if settings.get(k) == "auto"}
        )
        plugins = [*(instantiate(settings.get("plugins")) or ()), callbacks.Checkpoints()]
        trainer = instantiate(
            settings, callbacks=[*observers, self._timer], logger=loggers, plugins=plugins
        )
        launcher = trainer.strategy.launcher
        reruns = not getattr(launcher, "is_interactive_compatible", True)
        if self.in_sweep and reruns and trainer.num_devices > 1:
            raise UserError(
                f"{WHO}: {trainer.num_devices} devices with {type(trainer.strategy).__name__} "
                "start each process by running the command again, and with -m that is the whole "
                "sweep. Set trainer.devices=1, run the arms one by one, or use torchrun."
            )
        if self.cfg.graph:
            refuse_graph(trainer)
        callbacks.ask_seldom(trainer)
        return trainer

    def begin(self, trainer: Trainer) -> str | None:
        """Record that the run trains now; return the checkpoint that it resumes from or tests.

        If this same run has begun here, it is that run's last one, unless `ckpt_path` names another
        of this directory. Otherwise it is `ckpt_path`. What the run would overwrite is set aside.
        """
        self.checkpoint, last = self._given(), self.directory / LAST
        continues = (
            self.checkpoint and self.checkpoint.resolve().parent == last.resolve().parent
        )
        if not continues and last.is_file() and self._has_same_config():
            self.checkpoint = continues = last
        self._set_aside([METRICS] if continues else PRODUCTS)
        write(self.directory / CONFIG, self.config)
        self.result = {"config": OmegaConf.to_container(self.cfg, resolve=True)}
        self._write(status="running")
        for logger in trainer.loggers:
            # config.yaml is beside the files of a CSVLogger; for TensorBoard, see `report`.
            if not isinstance(logger, (CSVLogger, TensorBoardLogger)):
                logger.log_hyperparams(self.labels | {"config": self.result["config"]})
        say(str(self.directory))
        if self.checkpoint is None:
            return None
        say(f"{'resuming' if self.cfg.train else 'testing'}: {self.checkpoint}")
        return str(self.checkpoint)

    def _given(self) -> Path | None:
        """The path in `ckpt_path`; "last" is the last one here, or the newest beside."""
        if self.cfg.ckpt_path is None:
            return None
        path = Path(self.cfg.ckpt_path)
        if self.cfg.ckpt_path == "last":
            own, beside = self.directory / LAST, self.directory.parent.glob(f"*/{LAST}")
            found = [own] if own.is_file() else beside
            path = max(found, key=lambda path: path.stat().st_mtime, default=path)
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
        numbers = (
            int(p.name) for p in self.directory.glob(f"{FORMER}/*") if p.name.isdecimal()
        )
        aside = self.directory / FORMER / str(1 + max(numbers, default=0))
        aside.mkdir(parents=True)
        for name in moves:
            (self.directory / name).replace(aside / name)
        print(f"set aside: {aside} has the files of an earlier run", file=sys.stderr)

    def finish(self, trainer: Trainer, model: Learner, data: Source) -> None:
        """Write the result, and print a summary."""
        measure = model.measure
        gpu = (
            trainer.strategy.root_device.type == "cuda"
        )  # the model itself is back on the CPU
        fusions = normplug.fusions(model) if _convert.fused_modules(model) else ()
        fused = sum(row.label is not None for row in fusions)
        layers = dict(_convert.normplug_layers(model))
        items = data.batch_size * data.sizes.get("block_size", 1) * trainer.world_size
        timed, speed = "not timed: too few steps", None
        if step_ms := self._timer.median_ms():
            speed = items * 1e3 / step_ms  # images, or tokens, a second
            timed = f"{speed:,.0f} {measure.items}/s ({step_ms:.2f} ms a step)"
        # On the host, the peak of a process would include the earlier runs of a sweep.
        peak = torch.cuda.max_memory_allocated() if gpu else None
        # In a pre-norm model, the variances of the residual stream by depth.
        rows = [
            row for logger in callbacks.variance_loggers(trainer) for row in logger.last
        ]
        inputs = {row.layer: row.input_variance for row in rows}
        self._write(
            **model.result(),
            **data.facts(model.score("test")),
            **{measure.keys[-1]: speed},
            step_ms=step_ms,
            peak_memory_bytes=peak,
            norms_swapped=len(layers),
            target_variances={
                path: layer.target_variance for path, layer in layers.items()
            },
            input_variances={path: v for path, v in inputs.items() if math.isfinite(v)},
            norms_fused=fused,
            recompute=self.cfg.recompute and fused > 0,
            channels_last=self.cfg.channels_last,
            graph=self.cfg.graph,
            epochs=trainer.current_epoch,
            precision=str(trainer.precision),
            status="finished",
            gpus=trainer.world_size * gpu,
        )
        callbacks.report(trainer, self.labels, self.result)

        r, curve, epochs = self.result, model.scores_by_epoch, trainer.current_epoch
        files = (
            f"{p.name}/" if p.is_dir() else p.name for p in self.directory.glob("[!.]*")
        )
        titled = {
            f"validation {measure.name}": measure.text(curve[-1]) if curve else "",
            f"test {measure.name}": measure.text(model.score("test")),
            "trained": f"{epochs} epoch{'s' * (epochs != 1)}" if self.cfg.train else "",
            "speed": timed,
            "peak GPU memory": f"{peak / 2**20:,.0f} MiB" if peak else "",
            "norm layers": f"{len(layers)} swapped, {fused} fused",
            **callbacks.variance_lines(trainer),
            "written to": f"{self.directory}: {', '.join(sorted(files))}",
        }
        say(
            f"\n{r['model']} on {r['data']}, arm {r['arm']}, seed {r['seed']}: {r['hardware']}"
        )
        say("\n".join(f"{title:<19}  {text}" for title, text in titled.items() if text))

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
        versions = stamp(gpus > 0, "scikit-learn", gpus=max(gpus, 1))
        names = {"date": "date", "commit": "commit", "hardware": "device"}
        where = {key: versions.pop(name) for key, name in names.items()}
        self.result = self.labels | self.result | values | where | {"versions": versions}
        write(self.directory / RESULT, json.dumps(self.result, indent=2) + "\n")

    def stopped(self, error: BaseException) -> None:
        """Record what stopped the run. Then a sweep goes on, except after a signal.

        A sweep stops too where `result.json` is not this run's to write, or cannot be written.
        """
        outcome: dict[str, Any] = {"status": "failed"}
        if isinstance(error, Diverged):
            outcome = {"status": "diverged", "step": error.step}
        sentence, code = user_sentence(error, self.checkpoint), 1
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            signum = (
                signal.SIGTERM if isinstance(error, SIGTERMException) else signal.SIGINT
            )
            outcome, code = {"status": "interrupted"}, 128 + signum
            advice = f"Go on with the same command and hydra.run.dir={self.directory}"
            if self.in_sweep:
                advice = "The same sweep skips what has finished and resumes this run"
            sentence = f"interrupted: {self.directory}: {signum.name}. {advice}."
        text = sentence or f"{type(error).__name__}: {error}"
        recorded = self._records and (bool(self.result) or self.in_sweep)
        if recorded:
            try:
                self._write(**outcome, error=text)
            except OSError:  # a full disk
                recorded = False
        if self.in_sweep and recorded and code == 1:
            if not sentence:
                traceback.print_exception(error)
            callbacks.log.error(
                f"{outcome['status']}: {self.directory}: {' '.join(text.split())}"
            )
            return
        if not sentence:
            raise error
        print(sentence, file=sys.stderr)
        raise SystemExit(code) from None


def train(cfg: DictConfig, run: Run) -> None:
    """Train and test one arm."""
    seed_everything(cfg.seed, workers=True, verbose=False)
    data = instantiate(cfg.data, _convert_="all")
    net = instantiate(cfg.model, **data.sizes, _convert_="all")
    apply_arm(net, cfg, run.fuses)
    if cfg.channels_last:
        net.to(memory_format=torch.channels_last)
    if cfg.compile:
        net.compile()

    identity = {key: run.labels[key] for key in ("arm", "seed", "model", "data")}
    identity |= {"optimizer": cfg.optimizer._target_, "batch_size": data.batch_size}
    model = Learner(net, data.measure, cfg, identity)
    trainer = run.trainer()
    checkpoint = run.begin(trainer)
    if data.about():
        say(data.about())
    if cfg.train:
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
        kept = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        checkpoint = next((c.best_model_path for c in kept if c.monitor), None) or None
    trainer.test(model, datamodule=data, ckpt_path=checkpoint, verbose=False)
    run.finish(trainer, model, data)


def main() -> None:
    """Run the command line; a mistake in it gives one sentence."""
    given = {text.partition("=")[0] for text in sys.argv}
    if "data=text" in sys.argv and not {"model", "experiment"} & given:
        # Beside the data: argparse takes no overrides on both sides of -m.
        sys.argv.insert(sys.argv.index("data=text"), "model=gpt_tiny")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print
    try:
        run_arm()
    except Exception as error:
        sentence = user_sentence(error)
        if sentence is None or SHOWS_ALL:
            raise
        print(sentence, file=sys.stderr)
        sys.exit(1)


@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")
def run_arm(cfg: DictConfig) -> float | None:
    """Train and test one arm, unless it has finished; return its score for a search."""
    for message in QUIET:
        warnings.filterwarnings("ignore", message)
    gc.collect()  # objects of a sweep's previous run form cycles, and may hold GPU memory
    run = Run(cfg)
    try:
        if not run.has_finished():
            train(cfg, run)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        run.stopped(error)
    finally:
        run.lock.release()
    return run.score()


def validation_of(result: Mapping[str, Any]) -> float | None:
    """The last validation score in a `result.json`; None without one, or before the run's end."""
    curve = result.get(Measure.of(result).keys[1])
    if result.get("status") != "finished" or not curve:
        return None
    return float(curve[-1])


class CompareArms(Callback):
    """Refuse a sweep whose runs would share a directory; compare its arms when it ends."""

    @rank_zero_only
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        keys = unnamed_keys(config)
        if not keys:
            return
        names = ", ".join(key.removeprefix(CHOICES) for key in keys)
        tag = "_".join(f"${{{key}}}" for key in keys)
        # Hydra turns any other exception of a callback into a warning.
        print(
            f"{WHO}: the runs of a sweep over {names} would share a directory, and be one arm of "
            f"the comparison. Name an arm for each value: 'tag={tag}'. For learning rates there is "
            "experiment=rates.",
            file=sys.stderr,
        )
        sys.exit(1)

    @rank_zero_only
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from normplug.compare import main  # which training need not import

        if code := main([str(config.hydra.sweep.dir)]):
            sys.exit(code)


class ReportSearch(Callback):
    """Say at the end of a search how its trials ended, and which one is the best."""

    @rank_zero_only
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        directory = Path(config.hydra.sweep.dir)
        results: dict[str, dict[str, Any]] = {}
        for path in sorted(
            directory.rglob(RESULT), key=lambda path: path.stat().st_mtime
        ):
            trial = path.parent.relative_to(directory).as_posix()
            results[trial] = json.loads(path.read_bytes())
        scores: dict[str, float] = {}
        for trial, result in results.items():
            validation = validation_of(result)
            if validation is not None:
                scores[trial] = validation
        measures = {Measure.of(results[trial]) for trial in scores}
        statuses = Counter(result["status"] for result in results.values())
        counts = ", ".join(
            f"{count} {status}" for status, count in sorted(statuses.items())
        )
        print(f"{directory}: {counts}")
        if len(measures) == 1:
            best = max if config.hydra.sweeper.direction == "maximize" else min
            trial = best(scores, key=lambda trial: scores[trial])
            (measure,) = measures
            print(
                f"best: {trial}, validation {measure.name} {measure.text(scores[trial])}"
            )
        else:
            why = "no trial has a validation score"
            if measures:
                names = sorted(measure.name for measure in measures)
                why = f"the trials have different measures ({', '.join(names)})"
            print(
                f"{WHO}: {why}, so best_params in {directory}/optimization_results.yaml means "
                "nothing. Search over other options."
            )
        if statuses["failed"] or len(measures) > 1:
            sys.exit(1)
