"""A launch fills its kernel's arguments by name."""

from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from normplug._kernels.launch import Launch  # noqa: E402


@triton.jit
def _scale(x_ptr, y_ptr, N, root, BLOCK: tl.constexpr, ACC: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N) * root, mask=places < N)


SHAPE = SimpleNamespace(n=5, block=8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ACC": tl.float32}, "_scale: a launch must have a value for root"),
        ({"root": 1.0}, "_scale: a launch must have a value for ACC"),
        ({"root": 1.0, "ACC": tl.float32, "UNIT": 1}, "_scale has no argument UNIT"),
    ],
    ids=["a number missing", "a constant missing", "one too many"],
)
def test_a_missing_or_unknown_argument_is_an_error(given, message):
    with pytest.raises(TypeError, match=message):
        Launch(_scale, 1, 1, SHAPE, **given)
