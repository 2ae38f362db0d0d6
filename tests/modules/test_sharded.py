"""Norms of DTensors and norms under FSDP2, compared with stock layers in one process."""

import math

import pytest
import torch
import torch.nn.functional as F

import sharded_cases
import sync_cases
from accuracy import assert_no_worse
from normplug import swap
from sharded_cases import CASES, LAYER_NORM, MODE, ROWS, Block, Case, trained


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The results of two processes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        return sync_cases.ran(sharded_cases.process, 2, tmp_path_factory.mktemp("sharded"))


def in_one_process(case, dtype):
    """The stock layer's results on all of x, with sqrt(tv) in its weight."""
    layer, (x, dy) = case.layer().to(dtype), (t.to(dtype) for t in case.tensors())
    x.requires_grad_()
    scale = math.sqrt(MODE)
    if layer.weight is not None:
        layer.weight.data *= scale
    y = layer(x) if layer.weight is not None else layer(x) * scale
    y.backward(dy)
    out = {"y": y.detach(), "dx": x.grad, **sharded_cases.gradients(layer)}
    if "dweight" in out:
        out["dweight"] *= scale
    return out | dict(layer.named_buffers())


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_a_sharded_norm_is_as_close_to_float64_as_torch_in_one_process(index, pair):
    case = CASES[index]
    if pair[0]["numbers"][index] is None:
        pytest.skip("numpy is too new for this Triton")
    truth, theirs = in_one_process(case, torch.float64), in_one_process(case, case.dtype)
    for result in pair:
        ours, is_placed = result["numbers"][index]
        assert is_placed
        rounded = 4 * torch.finfo(case.dtype).eps  # of each process's share
        for name, value in ours.items():
            spare = rounded if name in ("dweight", "dbias") else 0.0
            assert_no_worse(name, value, theirs[name], truth[name], spare=spare)


def test_add_layer_norm_reduces_a_partial_sum_first(pair):
    x, residual = (t.requires_grad_() for t in Case(LAYER_NORM, ROWS, 0).tensors())
    weight = torch.full((8,), 2.0, requires_grad=True)
    total = x + residual
    y = F.layer_norm(total, (8,), weight * math.sqrt(MODE))
    (y.sum() + (total * total).sum()).backward()
    for result in pair:
        torch.testing.assert_close(result["added"], [y, total, x.grad, weight.grad])


def test_tensors_whose_all_reduce_is_in_flight_are_waited_for(pair):
    x, dy = (tensor.double() for tensor in Case(LAYER_NORM, ROWS, 1).tensors())
    y = F.layer_norm(x.requires_grad_(), (8,)) * math.sqrt(MODE)
    y.backward(dy)
    for result in pair:
        values, kind = result["arriving"]
        assert kind == "AsyncCollectiveTensor"
        torch.testing.assert_close(values, [y.detach().float(), x.grad.float()])


def test_a_compiled_layer_of_dtensors_is_one_graph(pair):
    for result in pair:
        eager, compiled = result["compiled"]
        torch.testing.assert_close(compiled, eager)


def test_sharded_running_statistics_are_refused(pair):
    for result in pair:
        assert "running_mean must be replicated; got a DTensor" in result["refused"]


def test_norms_under_sequence_parallel_train_as_in_one_process(pair):
    x = Case(LAYER_NORM, ROWS, 1).tensors()[0]
    swapped = trained(swap(Block(), MODE), x)
    for rank, result in enumerate(pair):
        *ours, stock = result["sequence_parallel"]
        torch.testing.assert_close(
            (stock["losses"], stock["weights"], stock["y"]), trained(Block(), x)
        )
        for one in ours:
            torch.testing.assert_close((one["losses"], one["weights"], one["y"]), swapped)
            torch.testing.assert_close(one["unswapped"], one["y"])
            assert one["report"] == "2 norm layers verified: 2 in mode 0.5"
            assert one["tracked"] == 3
            if rank == 0:
                own = x[:, :3].var(-1, correction=0).mean()
                torch.testing.assert_close(one["probe"][0], own)


def test_norms_under_fsdp2_train_as_stock_layers(pair):
    for result in pair:
        if "fully_sharded" not in result:
            pytest.skip("fully_shard before torch 2.14 does not run on the CPU")
        stock, *ours = result["fully_sharded"]
        for one in ours:
            losses, weights, y = one
            torch.testing.assert_close(losses, stock[0])
            torch.testing.assert_close(weights, stock[1])
            torch.testing.assert_close(y, stock[2])
