import gc
import os
import signal
from pathlib import Path

# Before torch: pytest runs one process per core, and the runs that tests compare must round alike.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

# No test starts a compiler by accident: the C++ path runs on a GPU and in Triton's interpreter
# only. Builds are cached between sessions, apart from the user's own cache.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IN_CPP = INTERPRETED or torch.cuda.is_available()
os.environ.setdefault("NORMPLUG_COMPILE_WORKERS", "0")  # pytest's processes use all cores
os.environ.setdefault("NORMPLUG_NATIVE", "1" if IN_CPP else "0")
os.environ.setdefault(
    "NORMPLUG_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "native")
)

collect_ignore = ["support/typed_uses.py"]  # for type checkers: nothing runs it

# A shell starts a job in the background with SIGINT ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `pytest --hypothesis-profile=thorough` tries more examples than every run does.
settings.register_profile("normplug", max_examples=100, deadline=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile("normplug")


def pytest_collection_modifyitems(items):
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


def pytest_terminal_summary(terminalreporter, config):
    """Say how to run the tests that this run leaves out."""
    whole_suite = config.args_source is not config.ArgsSource.ARGS
    interpreted = any("interpreted" in argument for argument in config.args)
    write = terminalreporter.write_line
    if not INTERPRETED and (whole_suite or interpreted):
        write(
            "The kernels in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/interpreted"
        )
    if not torch.cuda.is_available() and whole_suite:
        write("The tests that need a GPU, on a machine that has one: pytest -m gpu")


@pytest.fixture(autouse=True)
def _leave_the_gpus_memory_free(request):
    """Release cached GPU memory for tests in other processes."""
    yield
    if "gpu" in request.keywords:
        torch.cuda.empty_cache()
