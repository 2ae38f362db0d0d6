import pytest

import statistics_cases
import sync_cases
from programs import shared_folder


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """What each of two processes checks about running statistics."""
    checks = statistics_cases.IN_TWO
    with shared_folder(tmp_path_factory, "ranks") as folder:
        return sync_cases.ran(sync_cases.process, 2, folder, checks)
