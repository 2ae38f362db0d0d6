"""What Hydra calls when a sweep starts and ends."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from normplug._measure import RESULT
from normplug.experiment.config import CHOICES, unnamed_keys
from normplug.experiment.errors import WHO
from normplug.experiment.task import validation_of


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
            f"the comparison. Name an arm for each value: 'tag={tag}'. For learning rates, use "
            "experiment=rates.",
            file=sys.stderr,
        )
        sys.exit(1)

    @rank_zero_only
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from normplug.compare.__main__ import main  # which training need not import

        if code := main([str(config.hydra.sweep.dir)]):
            sys.exit(code)


class CompareModes(CompareArms):
    """As `CompareArms`, but time the arms' steps in turns, for one table and one picture."""

    @rank_zero_only
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from normplug.experiment.speed import compare_modes  # slow to import

        table = compare_modes(config.hydra.sweep.dir)
        if (table.n_finished < table.n_expected).any():
            sys.exit(1)


class ReportSearch(Callback):
    """Say at the end of a search how its trials ended; Optuna names the best options."""

    @rank_zero_only
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        directory = Path(config.hydra.sweep.dir)
        results = [json.loads(path.read_bytes()) for path in directory.rglob(RESULT)]
        statuses = Counter(result["status"] for result in results)
        counts = [f"{count} {status}" for status, count in sorted(statuses.items())]
        print(f"{directory}: {', '.join(counts)}")
        if all(validation_of(result) is None for result in results):
            print(
                f"{WHO}: no trial has a validation score, so best_params in "
                f"{directory}/optimization_results.yaml is meaningless. Search over other options."
            )
        if statuses["failed"]:
            sys.exit(1)
