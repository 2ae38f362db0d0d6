"""The kernels of gated and adaptive norms of rows on a GPU: sizes and dtypes."""

from dataclasses import replace

import pytest
import torch

from accuracy import assert_same_bits
from modulated_cases import EVERY, NEEDS, Case, assert_accurate, make, run
from routes import both_ways

pytestmark = pytest.mark.gpu
GPU = "cuda"
BOTH = {"vectors": "scale+shift", "centred": True}
GATED = [(8192, 4096), (4097, 768), (1000, 5120), (300, 8192), (3, 7), (20_001, 24)]
GROUPED = [((4096, 8192), 1024), ((2049, 1536), 512), ((33, 5120), 2560), ((300, 96), 3)]
SAMPLES = [
    (256, 256, 1152),
    (4, 4096, 1536),
    (2, 4097, 3072),
    (1, 1024, 8192),
    (1000, 3, 768),
    (100, 50, 24),
]
TOKENS = [(8, 1024, 1152), (3, 77, 4096), (2, 5, 8192), (300, 7, 96)]
CASES = [
    *(Case(shape, gate=gate) for shape in GATED for gate in ("first", "last")),
    *(Case(shape, gate="first", group_size=size) for shape, size in GROUPED),
    *(Case(shape, group_size=size) for shape, size in GROUPED),
    *(Case(shape, outer=shape[:1], **BOTH) for shape in SAMPLES),
    *(Case(shape, outer=shape[:1], vectors="scale") for shape in SAMPLES),
    *(Case(shape, outer=shape[:2], **BOTH) for shape in TOKENS),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_close_to_float64_as_torch_and_deterministic(case, dtype):
    case = replace(case, dtype=dtype)
    found = assert_accurate(case, GPU)
    assert_same_bits(found, run(case, make(case, GPU), "triton"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_is_accurate(case):
    if (case.group_size or case.shape[-1]) <= 4096:
        assert_accurate(replace(case, dtype=torch.float64), GPU)


@pytest.mark.parametrize("case", [*EVERY, *NEEDS], ids=str)
def test_small_calls_are_accurate_by_both_host_paths(case):
    assert_accurate(case, GPU)
    tensors = make(case, GPU)
    both_ways(lambda: run(case, tensors, "triton"))
