"""Run the kernels' tests in separate processes, where Triton interprets the kernels."""

import pytest

pytest.importorskip("triton")
import interpreted  # noqa: E402
from routes import HAS_RECOMPUTE  # noqa: E402

FILES = [
    "test_layer_norm_kernels.py", "test_pool_kernels.py", "test_calls.py",
    "test_batch_norm_kernels.py", "test_constant_kernels.py", "test_safe_kernels.py",
    "test_group_norm_kernels.py",
]  # fmt: skip
if HAS_RECOMPUTE:
    FILES.append("test_recompute.py")


@interpreted.NEEDS_INTERPRETER
def test_the_kernels_pass_their_tests_in_tritons_interpreter():
    interpreted.run(*(f"tests/kernels/{name}" for name in FILES), native="0")
