"""What is most about autograd runs once more, the C++ way; apart, for another process to take."""

import pytest

pytest.importorskip("triton")
import interpreted  # noqa: E402


@interpreted.NEEDS_INTERPRETER
def test_calls_by_kernel_pass_their_tests_the_cpp_way():
    interpreted.run("tests/native/test_host_path.py", native="1")
