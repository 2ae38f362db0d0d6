"""What a run costs, on systems that do not tell."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from forks import forked
from normplug.experiment.summary import summary
from normplug.experiment.timing import peak_memory_bytes, reset_peak_memory


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


@pytest.mark.parametrize(("peak", "shown"), [(None, "unknown"), (3 * 2**20, "3 MiB")])
def test_the_report_of_a_run_states_its_peak(tmp_path, peak, shown):
    names = ("model", "data", "arm", "seed", "hardware", "epochs", "norms_swapped", "norms_fused")
    result = dict.fromkeys(names, 1) | {"test_accuracy": 0.5, "images_per_s": None}
    text = summary({**result, "peak_memory_bytes": peak}, {}, tmp_path)
    assert f"peak memory          {shown}\n" in text
