import gc
import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: each core has a process of its own

import pytest  # noqa: E402
import torch  # noqa: E402

from training import run_in  # noqa: E402

# A test starts no compiler unseen: without a GPU, those of the C++ way ask for it. What it makes
# is kept for the next session, and not where the user keeps theirs.
os.environ.setdefault("NORMPLUG_COMPILE_WORKERS", "0")  # pytest's processes take all cores
os.environ.setdefault("NORMPLUG_NATIVE", "1" if torch.cuda.is_available() else "0")
os.environ.setdefault(
    "NORMPLUG_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "native")
)

# These import torchvision, or train.py, which needs it.
if find_spec("torchvision") is None:
    collect_ignore_glob = ["tools/test_data.py", "tools/test_train*.py"]

# Files of tests that take longer than a minute.
LONGEST = (
    "test_interpreter.py", "test_interpreter_cpp.py", "test_train.py", "test_zoo.py",
    "test_train_setup.py", "test_train_resume.py", "test_matrix.py", "test_train_failures.py",
    "test_package.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    # The longest first, so that no process waits for them at the end.
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish():
    """Leave what imports made out of garbage collection: a third of an interpreted test's time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # or libraries that count what is left at the end report leaks


@pytest.fixture(autouse=True)
def _leave_the_gpus_memory_free(request):
    """For tests beside this one, in other processes."""
    yield
    if "gpu" in request.keywords:
        torch.cuda.empty_cache()


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Call train.py in a directory of its own: (exit code, its output)."""
    monkeypatch.chdir(tmp_path)

    def call(*overrides, **how):
        capsys.readouterr()
        code = run_in(tmp_path, monkeypatch, *overrides, **how)
        return code, "".join(capsys.readouterr())

    return call
