"""What a run costs, on systems that do not tell."""

import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from lightning.pytorch.trainer.connectors.logger_connector import result

from forks import forked
from normplug._report.measure import ACCURACY
from normplug.experiment.learner import Learner
from normplug.experiment.summary import summary
from normplug.experiment.timing import (
    EpochLines,
    StepTimer,
    peak_memory_bytes,
    reset_peak_memory,
)
from training import PLAIN, SMALL


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
    for name in ("normplug.compare", "normplug.bench", "normplug._report.figures"):
        assert name not in done.stdout


def test_peak_memory_on_windows_is_psutils_or_unknown(monkeypatch):
    for method in ("read_text", "write_text"):  # of /proc
        monkeypatch.setattr(Path, method, Mock(side_effect=FileNotFoundError))
    for module in ("resource", "psutil"):
        monkeypatch.setitem(sys.modules, module, None)
    reset_peak_memory(gpu=False)
    assert peak_memory_bytes(gpu=False) is None
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=123))
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(Process=lambda: process))
    assert peak_memory_bytes(gpu=False) == 123


def test_without_a_bar_no_step_makes_a_number_for_it(trains, tmp_path, monkeypatch):
    read = Mock(side_effect=result.convert_tensors_to_scalars)
    monkeypatch.setattr(result, "convert_tensors_to_scalars", read)
    counts = []
    for steps in (1, 3):
        read.reset_mock()
        limit = f"+trainer.limit_train_batches={steps}"
        trains(*SMALL, PLAIN, limit, f"hydra.run.dir={tmp_path}/{steps}")
        counts.append(read.call_count)
    assert counts[0] == counts[1]  # those of the validation and the test


class Event:
    """A CUDA event; the GPU passes it when three more have been recorded, each 1 ms later."""

    made = 0
    alive = weakref.WeakSet()

    def __init__(self, enable_timing):
        assert enable_timing
        Event.alive.add(self)

    def record(self):
        self.number = Event.made = Event.made + 1

    def query(self):
        return self.number <= Event.made - 3

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.number - self.number


def test_the_timer_keeps_the_events_of_the_latest_steps_only(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", Event)
    timer = StepTimer()
    timer._gpu = True
    trainer = SimpleNamespace(global_step=0, callbacks=[])
    for step in range(40):
        timer.on_train_batch_start(trainer, None, None, step)
        timer.on_train_batch_end(trainer, None, None, None, step)
        assert len(Event.alive) < 10
    found = timer.summary(4, "images_per_s")
    assert (found["step_ms"], found["images_per_s"]) == (1.0, 2000.0)


@pytest.mark.parametrize(("max_epochs", "total"), [(20, " of 20"), (-1, ""), (None, "")])
def test_an_epochs_line_tells_how_many_there_are(capsys, max_epochs, total):
    learner = Mock(spec=Learner, measure=ACCURACY)
    learner.describe.return_value = "90 %"
    metrics = {"train/loss": 0.5}
    trainer = Mock(
        sanity_checking=False, current_epoch=6, max_epochs=max_epochs, callback_metrics=metrics
    )
    EpochLines("run").on_validation_end(trainer, learner)
    line = f"epoch   7{total}  training loss 0.5000  validation accuracy 90 %\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(("peak", "shown"), [(None, "unknown"), (3 * 2**20, "3 MiB")])
def test_the_report_of_a_run_states_its_peak(tmp_path, peak, shown):
    names = ("model", "data", "arm", "seed", "hardware", "epochs", "norms_swapped", "norms_fused")
    result = dict.fromkeys(names, 1) | {"test_accuracy": 0.5, "images_per_s": None}
    text = summary({**result, "peak_memory_bytes": peak}, {}, tmp_path)
    assert f"peak memory          {shown}\n" in text
