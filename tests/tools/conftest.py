from functools import partial
from types import SimpleNamespace

import pytest
import torch

from programs import shared_folder
from training import ARMS, GOLDEN, SWEEP, run_train


@pytest.fixture
def quick(monkeypatch):
    """Benchmarks repeat little, and compilers generate no code."""
    quick = {"TURN_MS": 0.1, "TURNS": 2, "COPY_BYTES": 2**20}
    values = {f"timing.{name}": value for name, value in quick.items()}
    for name, value in {**values, "models.WARM_UPS": 1}.items():
        monkeypatch.setattr(f"normplug.bench.{name}", value)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """A finished sweep of three arms: where it ran, its golden run, what it printed."""
    with shared_folder(tmp_path_factory, "sweep") as directory:
        printed = directory / "printed.txt"
        if not printed.exists():
            code, output = run_train(directory, *SWEEP, ARMS, "-m", draws=True)
            assert code == 0, output
            printed.write_text(output)
        output = printed.read_text()
    return SimpleNamespace(directory=directory, golden=directory / GOLDEN, output=output)


@pytest.fixture
def command(tmp_path):
    """Call train.py in a directory of its own; return (exit code, output)."""
    return partial(run_train, tmp_path)


def output_of(command, expected, *overrides, **how):
    code, output = command(*overrides, **how)
    assert code == expected, output
    assert code == 0 or "Traceback" not in output
    return output


@pytest.fixture
def trains(command):
    """As `command`, which must succeed: its output."""
    return partial(output_of, command, 0)


@pytest.fixture
def refuses(command):
    """As `command`, which must fail in sentences and not in a traceback: its output."""
    return partial(output_of, command, 1)
