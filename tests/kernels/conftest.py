"""What holds after every test that Triton interprets, and how its calls are cut into work."""

import os
from functools import partial

import pytest


@pytest.fixture(autouse=True)
def counters_end_at_zero(monkeypatch):
    """Every launch leaves its workspace's counters at zero, for the next one."""
    made = []
    if os.environ.get("TRITON_INTERPRET") == "1":
        from normplug._kernels.launch import Workspace

        def watched(work, *sizes, start=Workspace.__init__):
            made.append(work)
            start(work, *sizes)

        monkeypatch.setattr(Workspace, "__init__", watched)
    yield
    assert not any(work.counters.any() for work in made)


@pytest.fixture
def prepared(monkeypatch):
    """A function from the name of a setup of LayerNorm to a `Case` in it."""
    from row_setups import prepare

    return partial(prepare, monkeypatch)
