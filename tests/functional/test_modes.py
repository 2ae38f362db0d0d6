from decimal import Decimal

import numpy as np
import pytest

from normplug import NormMode, target_variance


def test_golden_is_one_over_phi_to_full_double_precision():
    exact = 2 / (1 + Decimal(5).sqrt())
    assert target_variance("golden") == float(exact)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("standard", 1.0),
        (1, 1.0),
        (0.5, 0.5),
        (3, 3.0),
        (np.float32(0.25), 0.25),
        (1e-300, 1e-300),
        (NormMode("golden"), target_variance("golden")),
        (NormMode(NormMode(2)), 2.0),
    ],
)
def test_every_accepted_mode_gives_a_float(mode, expected):
    value = target_variance(mode)
    assert type(value) is float
    assert value == expected


def test_modes_compare_and_print_by_their_target_variance():
    assert NormMode(1.0) == NormMode.STANDARD
    assert str(NormMode(target_variance("golden"))) == "golden"
    assert str(NormMode(0.5)) == "0.5"
    for mode in (NormMode.GOLDEN, NormMode.STANDARD, NormMode(0.25)):
        assert eval(repr(mode)) == mode
