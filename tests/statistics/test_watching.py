"""`watch`: what is logged is measured, in any loop."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import normplug
from normplug import fuse, swap, watch
from normplug.modules import batch_norm
from statistics_cases import Checkpointed, images, net, rows_of

GOLDEN = normplug.target_variance("golden")
COMPILE = partial(torch.compile, backend="eager")


@pytest.mark.parametrize("change", [lambda m: m, swap, lambda m: fuse(swap(m)), COMPILE])
def test_any_loop_is_measured_on_the_steps_that_are_asked_for(change, tmp_path):
    torch.compiler.reset()
    model = net()
    model[1].weight.data.fill_(2.0)
    ready = change(model)
    classes, losses = [type(m) for m in model.modules()], []
    with watch(ready, every=2) as w:
        for step in range(4):
            losses.append(ready(images(4, step)).sum())
            losses[-1].backward()
            ready.eval()(images(2))
            ready.train()
    assert [type(m) for m in model.modules()] == classes
    assert not any("_probe" in vars(m) or m._forward_hooks for m in model.modules())
    found = [(row.step, row.layer.split(".")[-1]) for row in w.rows]
    assert found == [(0, "1"), (0, "4"), (2, "1"), (2, "4")]
    for row in w.rows:
        scale = 4.0 if row.layer.endswith("1") else 1.0
        assert row.output_variance == pytest.approx(1.0, rel=1e-3)
        assert row.affine_variance == pytest.approx(scale, rel=1e-3)
    variance = net()[0](images(4, 2)).var((0, 2, 3), correction=0).mean().item()
    assert w.rows[2].input_variance == pytest.approx(variance, rel=1e-4)
    w.to_csv(tmp_path / "v.csv")
    assert len(rows_of(tmp_path / "v.csv")) == 4
    assert w.table().startswith("variance at step 2\nlayer")


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(4), nn.LayerNorm((9, 9)), nn.GroupNorm(2, 4)])
def test_a_layer_that_scales_its_output_by_3_does_not_log_its_target(layer, monkeypatch):
    model = swap(nn.Sequential(nn.Conv2d(3, 4, 1), layer), "golden", preserve_output=False)
    cls = type(model[1])
    run = cls._new_call
    monkeypatch.setattr(cls, "_new_call", lambda *a, **k: 3 * run(*a, **k))
    monkeypatch.setattr(batch_norm._BatchNorm, "_by_torch", lambda *a: None)
    monkeypatch.setattr(cls, "_by_torch", lambda *a: None)
    with watch(model, every=1) as w:
        model(images(8))
    (row,) = w.rows
    assert row.output_variance == pytest.approx(9 * GOLDEN, rel=2e-2)  # 5.56
    assert row.affine_variance == pytest.approx(9 * GOLDEN, rel=2e-2)


@pytest.mark.parametrize("change", [lambda m: m, lambda m: fuse(swap(m))])
@pytest.mark.parametrize("after", ["backward", "nothing"])
def test_details_are_measured_on_the_tensors(change, after, tmp_path):
    model, x = change(net()), images(8)
    model[1].bias.data = torch.tensor([-9.0, 9.0, 0.0, 0.0])
    with watch(model, every=1, details=True) as w:
        y = model(x)
        if after == "backward":
            (3 * y).sum().backward()
    first, second = w.rows
    h = net()[0](x)
    variances = h.var((0, 2, 3), correction=0).sort().values
    assert first.input_mean == pytest.approx(h.mean().item(), rel=1e-4)
    found = first.input_variance_10, first.input_variance_50, first.input_variance_90
    assert found == pytest.approx(variances[[0, 2, 3]].tolist(), rel=1e-4)
    assert (first.dead, first.saturated) == (0.25, 0.25)
    assert (second.dead, second.saturated) == (0.0, 0.0)
    gradient = 9.0 if after == "backward" else math.nan
    assert second.gradient == pytest.approx(gradient, nan_ok=True)
    w.to_csv(tmp_path / "v.csv")
    assert (tmp_path / "v.csv").read_text().splitlines()[0].endswith("dead,saturated,gradient")


def test_details_of_rows_are_taken_over_features():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].bias.data = torch.tensor([-9.0, 9.0, 0.0, 0.0])
    with watch(model, every=1, details=True) as w:
        model(torch.randn(2, 5, 4)).sum().backward()
    assert (w.rows[0].dead, w.rows[0].saturated, w.rows[0].gradient) == (0.25, 0.25, 1.0)


def test_weights_of_zero_tell_nothing_of_the_output_before_them():
    model = swap(net())
    model[1].weight.data.zero_()
    model[4].weight.data[:3] = 0.0
    with watch(model) as w:
        model(images(8))
    first, second = w.rows
    assert math.isnan(first.output_variance)
    assert first.affine_variance == 0
    assert second.affine_variance == pytest.approx(0.0, abs=1e-6)


def test_checkpointing_an_error_and_a_second_watch_leave_no_trace(tmp_path):
    pytest.importorskip("matplotlib")
    x = images(4).requires_grad_()
    for model in (net(), fuse(swap(net()))):
        outer = Checkpointed(model)
        for watched in (model, outer):
            with watch(watched, every=1) as w:
                for _ in range(2):
                    outer(x).sum().backward()
            assert [row.step for row in w.rows] == [0, 0, 1, 1]
    model = net()
    with pytest.raises(RuntimeError), watch(model, every=1) as w:
        model(images(4)[:, :2])
    assert type(model[1]) is nn.BatchNorm2d
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with watch(model, every=1) as w:
        for _ in range(3):
            model(images(4))
    w.plot(tmp_path / "variance.png")
    assert (tmp_path / "variance.png").stat().st_size > 5_000


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="watch: every must be at least 1; got 0"):
        watch(net(), every=0)
    with pytest.raises(TypeError, match="watch: model must be an nn.Module"):
        watch(3)
