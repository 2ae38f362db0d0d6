"""The time of a run's steps, and what train.py imports."""

import itertools
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from forks import forked
from normplug.experiment.callbacks import StepTimer


def test_training_imports_no_other_tool():
    pytest.importorskip("torchvision")
    code = """
import sys, train
print([name for name in sys.modules if name.startswith("normplug.")])
"""
    done = forked(code)
    assert done.returncode == 0, done.stderr
    assert "normplug.experiment.run" in done.stdout
    # Lightning imports matplotlib and SciPy itself; of normplug, these do.
    for name in ("normplug.compare", "normplug.bench", "normplug.experiment.compare"):
        assert name not in done.stdout


class Event:
    """A CUDA event; each is recorded 1 ms after the one before."""

    count, alive = itertools.count(), weakref.WeakSet()
    synchronize = Mock()

    def __init__(self, enable_timing):
        Event.alive.add(self)

    def record(self):
        self.number = next(Event.count)

    def elapsed_time(self, end):
        return end.number - self.number


def test_the_timer_keeps_the_events_of_the_latest_steps_only(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", Event)
    timer = StepTimer()
    timer._gpu = True
    trainer = SimpleNamespace(global_step=0, callbacks=[])
    for step in range(3000):
        timer.on_train_batch_start(trainer, None, None, step)
    assert len(Event.alive) < 1100
    assert timer.median_ms() == 1.0
