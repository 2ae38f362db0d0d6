"""Marks of the kernels' tests that run where Triton interprets them: see `test_interpreter`."""

import pytest

pytest.importorskip("triton")

from normplug._kernels.launch import INTERPRETED  # noqa: E402

MARKS = [
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: see test_interpreter"),
    # numpy's, where a GPU says nothing: exp of much, and values that are masked afterwards.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    # The interpreter's own, of Triton before 3.7.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    # torch's own, of its forward mode.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]
