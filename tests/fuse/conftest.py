"""What the tests of fused models share as a fixture."""

import logging

import pytest

import routes
from normplug import native


@pytest.fixture
def calls(monkeypatch):
    """What is computed in one call with a norm, in order."""
    with native.python_way():  # even if the C++ path is loaded meanwhile
        yield routes.watch_fused(monkeypatch)


@pytest.fixture
def traces(caplog):
    """How many forwards have been traced so far."""
    caplog.set_level(logging.DEBUG, "normplug.fuse")
    return lambda: sum(record.name == "normplug.fuse" for record in caplog.records)
