import pytest
import torch

from matrix import randomised
from swap_cases import Net


@pytest.fixture
def net():
    torch.manual_seed(0)
    return randomised(Net())
