"""A norm that the package does not know: what it declares is all that the package needs.

`docs/add-a-norm.md` explains each declaration.
"""

import copy
import math
import pickle

import pytest
import torch
from torch import fx, nn

from normplug import _convert, check, fuse, fusions, plan, swap, unswap
from normplug.modes import target_variance
from normplug.modules import TargetVarianceNorm
from swap_cases import one_graph

ROOT = target_variance("golden") ** 0.5
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)) * 3


class Rescale(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps), over the last dimension; the stock class."""

    def __init__(self, width, eps=1e-6, affine=True):
        super().__init__()
        self.width, self.eps, self.affine = width, eps, affine
        self.weight = nn.Parameter(torch.ones(width)) if affine else None

    def forward(self, input):
        return formula(input, self.weight, self.eps, 1.0)

    def extra_repr(self):
        return f"{self.width}, eps={self.eps}"


def formula(x, weight, eps, tv):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * math.sqrt(tv)
    return y if weight is None else y * weight


class TargetRescale(TargetVarianceNorm, Rescale):
    """`Rescale` with a target second moment."""

    def forward(self, input):
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        y = formula(input, self.weight, self._eps, self.target_variance)
        if self._probe is not None:
            self._record(input, y)
        return y

    def _affine_shape(self):
        return (self.width,)

    def _expected(self, x, training):
        return formula(x.double(), self.weight, self._eps, self.target_variance).to(
            x.dtype
        )

    def _variance(self, x):
        return x.square().mean(-1)


_convert.register(TargetRescale, Rescale)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Rescale(6)
        self.linear = nn.Linear(6, 6)
        self.last = Rescale(6)

    def forward(self, x):
        x = x + self.linear(self.norm(x).relu())
        return self.last(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Block())
    for norm in (model[1].norm, model[1].last):
        nn.init.normal_(norm.weight, 1, 0.3)
    return model


def kinds(model):
    return [type(m) for m in model.modules() if isinstance(m, Rescale)]


@pytest.mark.parametrize("training", [True, False])
def test_it_is_planned_swapped_and_unswapped_with_the_same_outputs(model, training):
    model.train(training)
    keys, scaled = set(model.state_dict()), copy.deepcopy(model)
    for norm in (scaled[1].norm, scaled[1].last):
        norm.weight.data.mul_(ROOT)
    expected = scaled(X)
    assert plan(model).summary() == "2 of 2 norm layers: 2 Rescale"
    assert [row.becomes for row in plan(model, exclude="1.last")] == [
        "TargetRescale",
        None,
    ]
    assert kinds(swap(model, "golden")) == [TargetRescale] * 2
    assert {row.note for row in plan(model)} == {"swapped already, mode golden"}
    torch.testing.assert_close(model(X), expected)
    assert set(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), model(X))
    assert not any(_convert.synchronise(m) for m in model.modules())  # it is no BatchNorm
    torch.testing.assert_close(unswap(model)(X), expected)
    assert kinds(model) == [Rescale] * 2
    assert not any("normplug" in name for name in vars(model[1].norm))


def test_check_counts_it_and_compares_its_formula(model, monkeypatch):
    report = check(swap(model, "golden"), X)
    assert report.summary() == "2 norm layers verified: 2 in mode golden"
    assert {layer.tested for layer in report} == {"train, eval, eval under no_grad"}
    with monkeypatch.context() as patch:
        patch.setattr(TargetRescale, "forward", Rescale.forward)
        with pytest.raises(
            RuntimeError, match="1.last: in eval, its output differs from"
        ):
            check(model)
    model[1].norm = Rescale(6)
    with pytest.raises(
        RuntimeError, match="1.norm: swapped in mode golden, now a Rescale"
    ):
        check(model)


@pytest.mark.filterwarnings("ignore:normplug. .* gets a weight of")
def test_its_outputs_are_preserved_and_a_missing_weight_is_created():
    layer = Rescale(6, affine=False)
    expected = layer(X)
    torch.testing.assert_close(swap(layer, 0.3, preserve_output=True)(X), expected)
    assert layer.weight.shape == (6,)
    torch.testing.assert_close(unswap(layer)(X), expected)
    assert not layer.state_dict()


def test_fuse_fx_and_compilers_treat_it_as_a_layer(model):
    expected = swap(model, "golden").eval()(X)
    graph = fx.symbolic_trace(model)
    assert {"1.norm", "1.last"} <= {
        n.target for n in graph.graph.nodes if n.op == "call_module"
    }
    torch.testing.assert_close(graph(X), expected)
    torch.testing.assert_close(one_graph(model)(X), expected)
    with pytest.warns(UserWarning, match="normplug.fuse: nothing to fuse in Sequential"):
        fuse(model)
    assert torch.equal(model(X), expected)
    assert [(row.kind, row.label) for row in fusions(model)] == [
        ("TargetRescale", None)
    ] * 2


def test_it_is_constructed_with_a_mode():
    layer = TargetRescale(6, eps=1e-3, mode=0.5)
    assert repr(layer) == "TargetRescale(6, eps=0.001, mode=0.5)"
    moment = layer(X).square().mean(-1)
    torch.testing.assert_close(moment, torch.full((16,), 0.5), rtol=1e-2, atol=0)
    with pytest.raises(
        ValueError, match="normplug.TargetRescale: backend must be one of"
    ):
        TargetRescale(6, backend="cuda")
    with pytest.warns(
        UserWarning, match=r"mode 0\.5 is loaded into layers of mode standard"
    ):
        TargetRescale(6).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("mode", [None, 0.5])
def test_its_variance_is_logged_stock_or_swapped(model, mode, tmp_path):
    lightning_cases = pytest.importorskip("lightning_cases")
    from normplug.lightning import VarianceLogger

    if mode is not None:
        swap(model, mode)
    before, logger = kinds(model), VarianceLogger(every_n_steps=1, dirpath=tmp_path)
    model.extend([nn.Flatten(), nn.Linear(108, 4)])
    lightning_cases.fit(lightning_cases.Module(lambda: model), 8, tmp_path, logger)
    assert [row.layer for row in logger.last] == ["net.1.norm", "net.1.last"]
    for row in logger.last:
        assert row.output_variance == pytest.approx(
            target_variance(mode or "standard"), rel=1e-3
        )
        assert row.weight_rms != 1
    assert kinds(model) == before
