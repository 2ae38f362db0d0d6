"""What tests of kernels that Triton interprets share."""

import os
from dataclasses import replace

import pytest
import torch

import routes


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


@pytest.fixture
def prepared(request, monkeypatch):
    """A function from the name of one of the file's SETUPS to its case, with its schedules."""

    def prepare(name, **options):
        case, schedules = request.module.SETUPS[name]
        routes.reschedule(monkeypatch, **schedules)
        return replace(case, **options)

    return prepare
