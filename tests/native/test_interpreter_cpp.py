"""What is most about autograd runs once more, the C++ way; apart, for another process to take."""

import pytest

pytest.importorskip("triton")
import interpreted  # noqa: E402
from routes import HAS_RECOMPUTE  # noqa: E402

FILES = ["tests/native/test_host_path.py"]
if HAS_RECOMPUTE:
    FILES.append("tests/kernels/test_recompute.py")


@interpreted.NEEDS_INTERPRETER
def test_calls_by_kernel_pass_their_tests_the_cpp_way():
    # Without the largest models, which take half of the time.
    interpreted.run(*FILES, "-k", "not blocks", native="1")
