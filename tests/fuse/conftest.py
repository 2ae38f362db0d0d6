"""What the tests of fused models share as a fixture."""

import logging

import pytest

from normplug import functional
from normplug._ops import choice


@pytest.fixture
def calls(monkeypatch):
    """What goes through the fused functions."""
    made = []
    batch_norm, add_layer_norm = functional._fused_batch_norm, functional.add_layer_norm
    pooled, layer_norm = functional._batch_norm_max_pool, functional.layer_norm

    def watched_batch_norm(*args, residual=None, activation=None, **options):
        if residual is not None or activation is not None:
            made.append("add, " * (residual is not None) + str(activation))
        return batch_norm(*args, residual=residual, activation=activation, **options)

    def watched_pool(*args, **options):
        before = len(made)
        y = pooled(*args, **options)
        made[before:] = ["relu, max pool"]  # beside or in place of a call without
        return y

    def watched_add(*args, **options):
        made.append("add before")
        return add_layer_norm(*args, **options)

    def watched_layer_norm(*args, input_bias=None, **options):
        if input_bias is not None:
            made.append("bias before")
        return layer_norm(*args, input_bias=input_bias, **options)

    monkeypatch.setattr(choice, "has_kernels", lambda who, backend, x: True)  # on the CPU, too
    monkeypatch.setattr(functional, "layer_norm", watched_layer_norm)
    monkeypatch.setattr(functional, "_fused_batch_norm", watched_batch_norm)
    monkeypatch.setattr(functional, "_batch_norm_max_pool", watched_pool)
    monkeypatch.setattr(functional, "add_layer_norm", watched_add)
    return made


@pytest.fixture
def traces(caplog):
    """How many forwards have been traced so far."""
    caplog.set_level(logging.DEBUG, "normplug.fuse")
    return lambda: sum(record.name == "normplug.fuse" for record in caplog.records)
