"""What holds after every test that Triton interprets."""

import os

import pytest

import routes


@pytest.fixture(autouse=True)
def counters_end_at_zero(monkeypatch):
    """Every launch leaves its workspace's counters at zero, for the next one."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    made = routes.watch_workspaces(monkeypatch) if interpreted else []
    yield
    assert not any(work.counters.any() for work in made)
