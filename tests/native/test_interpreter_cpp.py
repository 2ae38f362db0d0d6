"""Run the host path's tests in Triton's interpreter; a separate file, for pytest to distribute."""

import pytest

pytest.importorskip("triton")
import interpreted  # noqa: E402


@interpreted.NEEDS_INTERPRETER
def test_the_host_path_passes_its_tests_in_tritons_interpreter():
    interpreted.run("tests/native/test_host_path.py", native="1")
