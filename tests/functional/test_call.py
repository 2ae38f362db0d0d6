"""The way of a call: how long it is, what it asks once, and what is logged of it."""

import pytest
import torch

from calls import walked
from normplug import functional
from normplug._ops import call
from normplug._ops.batch_norm import BatchNormSpec
from normplug._ops.group_norm import GroupNormSpec
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Pool, from_text, to_text

X = torch.linspace(-1, 2, 24).view(4, 6)


@pytest.fixture
def nothing_stored(monkeypatch):
    monkeypatch.setattr(call, "_stored", {})


def test_the_first_call_passes_few_files_and_makes_its_key_once(nothing_stored):
    running = torch.zeros(6), torch.ones(6)
    first = walked(functional.batch_norm, X, *running, training=True, mode="golden")
    assert len({file for file, _ in first}) <= 12
    assert [name for _, name in first].count("key_of") == 1
    again = walked(functional.batch_norm, X, *running, training=True, mode="golden")
    assert len(again) <= 13
    assert "check" not in [name for _, name in again]


def test_a_stored_call_is_checked_again_if_anything_differs(nothing_stored):
    weight = torch.ones(6)
    for _ in range(2):
        functional.layer_norm(X, (6,), weight)
    with pytest.raises(ValueError, match="weight must be of shape"):
        functional.layer_norm(X, (6,), torch.ones(5))
    with pytest.raises(TypeError, match="momentum must be a number"):
        functional.layer_norm(X, (6,), weight, momentum=[])
    with pytest.raises(ValueError, match="weight must be on the input's device"):
        functional.layer_norm(X, (6,), weight.to("meta"))


def test_a_stored_call_runs_in_transforms_and_modes_as_a_new_one(nothing_stored):
    expected = functional.layer_norm(X, (6,), mode=0.5)
    found = torch.func.vmap(lambda x: functional.layer_norm(x, (6,), mode=0.5))(
        X[:, None]
    )
    torch.testing.assert_close(found[:, 0], expected, rtol=0, atol=0)


def test_a_new_call_is_logged_with_its_kernels_and_the_reason(nothing_stored, caplog):
    caplog.set_level("DEBUG", "normplug")
    for _ in range(2):
        functional.layer_norm(X, (6,))
        functional.group_norm(X, 2, activation="silu", backend="torch")
    expected = {"layer_norm": "the input is on cpu", "group_norm": "backend is 'torch'"}
    assert caplog.messages == [
        f"normplug.functional.{name} of (4, 6): PyTorch's kernels, because {reason}"
        for name, reason in expected.items()
    ]


POOL = Pool((3, 3), (2, 2), (1, 1), False)
SPECS = [
    BatchNormSpec(True, 0.1, 1e-5, 0.618, ("leaky_relu", 0.2), POOL, join=2),
    BatchNormSpec(False, None, 1e-3, 1.0),
    GroupNormSpec(4, 1e-5, 1.0, "silu", torch.bfloat16, "low"),
    LayerNormSpec(
        (8,), 0.1, None, 1 / 3, torch.float16, "float32", False, 1.0, "input", "first", 4
    ),
    LayerNormSpec((4, 8), 0.1, 1e-5, 1.0, None, "low", adaptive=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_a_spec_is_read_back_from_its_text(spec):
    again = from_text(type(spec), to_text(spec))
    assert again == spec
    assert [type(value) for value in again] == [type(value) for value in spec]
