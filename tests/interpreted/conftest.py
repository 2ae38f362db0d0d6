"""Kernels that Triton interprets: `TRITON_INTERPRET=1 pytest tests/interpreted`.

The interpreter must be chosen before Triton is imported, so the folder is collected only where the
variable is set. There, backend="triton" accepts CPU tensors. The interpreter runs programs one
after another, in order, so no schedule here may have programs that wait for a later one.
"""

import contextlib
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from normplug import native

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    import interpreted
    import routes
    from normplug._kernels.launch import Workspace
else:
    collect_ignore_glob = ["*"]

# Warnings that no GPU gives.
IGNORED = [
    # numpy's, of exp of large values, and of values that are masked afterwards.
    "overflow encountered:RuntimeWarning",
    "invalid value encountered:RuntimeWarning",
    "divide by zero encountered:RuntimeWarning",
    # The interpreter's own, of Triton before 3.7.
    "Conversion of an array with ndim > 0:DeprecationWarning",
    # torch's own, of its forward mode.
    "`torch.jit.script` is deprecated",
]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        if not interpreted.INTERPRETS:
            reason = "numpy is too new for this Triton's interpreter"
            item.add_marker(pytest.mark.skip(reason=reason))
        for warning in IGNORED:
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))


@pytest.fixture(autouse=True)
def host_path(request):
    """Run the host path in Python, or in C++ where a file says `HOST_PATH = "C++"`."""
    in_cpp = getattr(request.module, "HOST_PATH", "Python") == "C++"
    with contextlib.nullcontext() if in_cpp else native.python_way():
        yield


@pytest.fixture(autouse=True)
def workspaces_are_left_in_order(monkeypatch):
    """Every launch leaves its counters at zero, for the next one, and memory beyond its room."""
    made, beyond = [], 64

    def watched(work, device, dtype, counters, room, start=Workspace.__init__):
        start(work, device, dtype, counters + beyond, room + beyond)
        after = work.partial[room:].fill_(torch.nan)
        made.append((work.counters, after))
        work.counters, work.partial = work.counters[:counters], work.partial[:room]

    monkeypatch.setattr(Workspace, "__init__", watched)
    yield
    for counters, after in made:
        if type(counters) is torch.Tensor:  # and not a fake one
            assert not counters.any()
            assert after.isnan().all()


@pytest.fixture
def prepared(request, monkeypatch):
    """A function from the name of one of the file's SETUPS to its case, with its schedules."""

    def prepare(name, **options):
        case, schedules = request.module.SETUPS[name]
        routes.reschedule(monkeypatch, **schedules)
        return replace(case, **options)

    return prepare
