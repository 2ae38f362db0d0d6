"""What holds after every test that Triton interprets."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def workspaces_are_left_in_order(monkeypatch):
    """Every launch leaves its counters at zero, for the next one, and memory beyond its room."""
    made, beyond = [], 64
    if os.environ.get("TRITON_INTERPRET") == "1":
        from normplug._kernels.launch import Workspace

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
