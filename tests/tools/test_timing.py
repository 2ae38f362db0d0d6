"""What a run costs, on systems that do not tell."""

import itertools
import sys
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from forks import forked
from normplug.experiment.callbacks import StepTimer, peak_memory_bytes


def test_training_imports_no_other_tool_and_needs_no_resource():
    pytest.importorskip("torchvision")
    code = """
import sys, train
print([name for name in sys.modules if name.startswith("normplug.")])
"""
    done = forked(code, hidden=["resource"])  # as on Windows
    assert done.returncode == 0, done.stderr
    assert "normplug.experiment.run" in done.stdout
    # Lightning imports matplotlib and SciPy itself; of normplug, these do.
    for name in ("normplug.compare", "normplug.bench", "normplug.experiment.compare"):
        assert name not in done.stdout


def test_peak_memory_is_unknown_on_windows(monkeypatch):
    assert peak_memory_bytes(gpu=False) > 2**26
    monkeypatch.setitem(sys.modules, "resource", None)
    assert peak_memory_bytes(gpu=False) is None


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
        timer.on_train_batch_end(trainer, None, None, None, step)
    assert len(Event.alive) < 2100
    found = timer.summary(4, "images_per_s")
    assert (found["step_ms"], found["images_per_s"]) == (1.0, 2000.0)
