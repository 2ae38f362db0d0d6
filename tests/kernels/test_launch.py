"""A launch names its kernel's arguments, in their order."""

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from normplug._kernels.launch import Launch  # noqa: E402


@triton.jit
def _scale(x_ptr, y_ptr, N, factor, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N) * factor, mask=places < N)


NAMES = {
    "pointers": ("x", "y"),
    "sizes": {"N": 5},
    "scalars": {"factor": 2.0},
    "constants": {"BLOCK": 8},
}


def test_the_kernels_own_names_are_accepted():
    Launch(_scale, 1, **NAMES, warps=1)


@pytest.mark.parametrize(
    ("names", "difference"),
    [
        ({"pointers": ("y", "x")}, "argument 0 is x_ptr, and the launch names y_ptr"),
        ({"sizes": {"N": 5, "M": 5}}, "argument 3 is factor, and the launch names M"),
        ({"sizes": {"factor": 5}, "scalars": {"N": 2.0}}, "argument 2 is N, .* names factor"),
        ({"constants": {}}, "argument 4 is BLOCK, and the launch names nothing"),
        ({"constants": {"BLOCK": 8, "UNIT": 1}}, "argument 5 is nothing, .* names UNIT"),
    ],
    ids=["two swapped", "one more size", "size for scalar", "a constant missing", "one too many"],
)
def test_other_names_are_rejected(names, difference):
    rule = r"_scale: a launch must name the kernel's arguments in their order; "
    with pytest.raises(TypeError, match=rule + difference):
        Launch(_scale, 1, **{**NAMES, **names}, warps=1)
