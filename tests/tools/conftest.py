from types import SimpleNamespace

import pytest

from training import ARMS, GOLDEN, SWEEP, one_thread, output_in


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """A finished sweep of three arms: where it ran, its golden run, what it printed."""
    directory = tmp_path_factory.mktemp("sweep")
    with one_thread(), pytest.MonkeyPatch.context() as monkeypatch:
        code, output = output_in(directory, monkeypatch, *SWEEP, ARMS, "-m")
    assert code == 0, output
    return SimpleNamespace(directory=directory, golden=directory / GOLDEN, output=output)
