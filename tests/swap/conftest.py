import pytest

from swap_cases import make_net


@pytest.fixture
def net():
    return make_net()
