import gc
import os
import signal
from importlib.util import find_spec
from pathlib import Path

# Before torch: pytest runs one process per core, and the runs that tests compare must round alike.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

# No test starts a compiler by accident: without a GPU, the tests of the C++ path enable it
# themselves. Builds are cached between sessions, apart from the user's own cache.
os.environ.setdefault("NORMPLUG_COMPILE_WORKERS", "0")  # pytest's processes use all cores
os.environ.setdefault("NORMPLUG_NATIVE", "1" if torch.cuda.is_available() else "0")
os.environ.setdefault(
    "NORMPLUG_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "native")
)

# A shell starts a job in the background with SIGINT ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# These import torchvision, or train.py, which needs it.
if find_spec("torchvision") is None:
    collect_ignore_glob = [
        "tools/test_data.py",
        "tools/test_graph.py",
        "tools/test_train*.py",
    ]

# The test files that take longest, about half of the time of all.
LONGEST = (
    "test_interpreter.py", "test_compiles.py", "test_train.py", "test_train_setup.py",
    "test_interpreter_cpp.py", "test_zoo.py", "test_matrix.py", "test_train_resume.py",
    "test_train_failures.py", "test_train_directories.py", "test_sync.py", "test_package.py",
    "test_sync_kernels.py", "test_bench_ops.py", "test_ahead.py", "test_benchmarks.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    # Start the longest first, so that no process waits for them at the end.
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    no_gpu = not torch.cuda.is_available()
    for item in items:
        if no_gpu and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    """Keep the collector off imported objects: it takes a third of an interpreted test's time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # or libraries that count live objects at exit report leaks


@pytest.fixture(autouse=True)
def _leave_the_gpus_memory_free(request):
    """Release cached GPU memory for tests in other processes."""
    yield
    if "gpu" in request.keywords:
        torch.cuda.empty_cache()
