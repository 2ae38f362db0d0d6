"""Which memory layouts count as contiguous and as channels_last."""

import pytest
import torch

from normplug._layouts import is_channels_last, is_contiguous


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((3, 1, 4), (4, 99, 1)), ((1, 3), (7, 1)), ((3, 1), (1, 5)), ((3, 2), (1, 3))],
    ids=str,
)
def test_the_stride_of_a_dimension_of_size_1_does_not_matter(shape, stride):
    x = torch.empty_strided(shape, stride)
    assert is_contiguous(shape, stride) == x.is_contiguous()


def test_an_image_of_one_pixel_is_channels_last_whatever_its_strides():
    assert is_channels_last((2, 3, 1, 1), (3, 1, 1, 1))
    assert is_channels_last((2, 3, 1, 1), (3, 1, 3, 3))
    assert not is_channels_last((2, 3, 2, 1), (6, 2, 1, 1))
