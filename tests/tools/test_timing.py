"""What a run costs, on systems that do not tell."""

import itertools
import sys
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from forks import forked
from normplug.experiment.callbacks import EpochLines, StepTimer, peak_memory_bytes
from normplug.experiment.learner import Learner
from normplug.experiment.measure import ACCURACY


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


@pytest.mark.parametrize(("max_epochs", "total"), [(20, " of 20"), (-1, ""), (None, "")])
def test_an_epochs_line_has_the_mean_loss_the_rate_and_the_time_left(
    capsys, caplog, monkeypatch, max_epochs, total
):
    clock = iter([0.0, 0.0, 1.0, 2.0, 30.0])  # start, start of the epoch, two steps, the line
    monkeypatch.setattr("normplug.experiment.callbacks.time.perf_counter", lambda: next(clock))
    learner = Mock(spec=Learner, measure=ACCURACY)
    learner.describe.return_value = "90 %"
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.25}])
    trainer = Mock(
        sanity_checking=False, current_epoch=6, max_epochs=max_epochs, optimizers=[optimizer]
    )
    lines = EpochLines()
    lines.on_fit_start(trainer, learner)
    lines.on_train_epoch_start(trainer, learner)
    for step, loss in enumerate([0.5, 0.7]):
        lines.on_train_batch_end(trainer, learner, {"loss": torch.tensor(loss)}, None, step)
    with caplog.at_level("INFO"):
        lines.on_validation_end(trainer, learner)
    (line,) = caplog.messages
    left = "  6:30 left" if total else ""  # 13 epochs of 30 s
    told = "training loss 0.6000  validation accuracy 90 %  lr 0.25  1 steps/s"
    assert line == f"epoch   7{total}  {told}{left}"
