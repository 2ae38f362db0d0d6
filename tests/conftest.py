import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _leave_the_gpus_memory_free(request):
    """For tests beside this one, in other processes."""
    yield
    if "gpu" in request.keywords:
        torch.cuda.empty_cache()
