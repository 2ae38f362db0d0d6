"""Norms of other libraries: swap converts those that it knows, with all that they add."""

import copy
import inspect
import pickle
import warnings
from functools import partial
from importlib import import_module
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from normplug import _convert, check, fuse, plan, swap, target_variance, unswap
from normplug.lightning import norm_layers
from normplug.modules.probe import Probe, averages
from programs import program
from swap_cases import one_graph

ROOT = target_variance("golden") ** 0.5
X = torch.randn(4, 8, 5, 6, generator=torch.Generator().manual_seed(0)) * 2 + 1
LAST = X.to(memory_format=torch.channels_last)


def layer_of(module, name, *args, **kwargs):
    """A factory of the layer with random weights, which skips if its library is not installed."""

    def make():
        pytest.importorskip(module.partition(".")[0])
        layer = getattr(import_module(module), name)(*args, **kwargs)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(1, 0.3)
        return layer

    return pytest.param(make, id=f"{module}.{name} {kwargs.get('act_layer', '')}")


timm_layer = partial(layer_of, "timm.layers")


def transformers_layer(name, folder):
    module = f"transformers.models.{folder}.modeling_{folder}"
    return layer_of(module, name, 8, data_format="channels_first")


LLAMA = "transformers.models.llama.modeling_llama"
# What a layer reads of its model's config.
BIT = SimpleNamespace(num_groups=4, hidden_act="relu")
ACTIVATIONS = ("relu", "silu", "gelu", "relu6", "hard_swish", "gelu_tanh", "leaky_relu")
IMAGES = [
    *(timm_layer("BatchNormAct2d", 8, act_layer=act) for act in ACTIVATIONS),
    timm_layer("BatchNormAct2d", 8, apply_act=False),
    timm_layer("BatchNormAct2d", 8, affine=False),
    timm_layer("BatchNormAct2d", 8, drop_layer=nn.Dropout),
    timm_layer("GroupNorm", 8, num_groups=4),
    timm_layer("GroupNorm1", 8, affine=False),
    timm_layer("GroupNormAct", 8, num_groups=2, act_layer="silu"),
    timm_layer("GroupNormAct", 8, num_groups=2, drop_layer=nn.Dropout),
    timm_layer("GroupNorm1Act", 8, act_layer="leaky_relu"),
    timm_layer("LayerNorm2d", 8),
    layer_of("timm.layers.norm", "LayerNormExp2d", 8),
    timm_layer("LayerNorm2dFp32", 8),
    timm_layer("LayerNormAct2d", 8, act_layer="silu"),
    timm_layer("RmsNorm2d", 8),
    timm_layer("RmsNormAct2d", 8, act_layer="silu"),
    timm_layer("LayerNormAct2dFp32", 8, act_layer="gelu", drop_layer=nn.Dropout),
    layer_of("timm.models.metaformer", "GroupNorm1NoBias", 8),
    layer_of("timm.models.metaformer", "LayerNorm2dNoBias", 8),
    layer_of("torchvision.models.convnext", "LayerNorm2d", 8, eps=1e-6),
    transformers_layer("ConvNextLayerNorm", "convnext"),
    transformers_layer("ConvNextV2LayerNorm", "convnextv2"),
    transformers_layer("SamLayerNorm", "sam"),
    layer_of("transformers.models.bit.modeling_bit", "BitGroupNormActivation", BIT, 8),
    layer_of(
        "transformers.models.poolformer.modeling_poolformer", "PoolFormerGroupNorm", 8
    ),
]
ROWS = [
    timm_layer("LayerNorm", 6),
    timm_layer("LayerNorm", 6, affine=False),
    timm_layer("LayerNormFp32", 6),
    timm_layer("LayerNormAct", 6, act_layer="relu"),
    timm_layer("LayerNormActFp32", 6),
    timm_layer("RmsNorm", 6),
    timm_layer("RmsNorm", 6, affine=False),
    timm_layer("RmsNormFp32", 6),
]


@pytest.fixture(params=[*IMAGES, *ROWS])
def layer(request):
    return request.param()


@pytest.fixture
def layers():
    """timm's layers; most tests use BatchNormAct2d."""
    return pytest.importorskip("timm.layers")


def run(layer, x, training):
    """Output, gradients and buffers of one call."""
    torch.manual_seed(1)
    x = x.detach().clone().requires_grad_()
    y = layer.train(training)(x)
    grads = torch.autograd.grad((y * y.detach().cos()).sum(), [x, *layer.parameters()])
    return [y, *grads, *(b.clone() for name, b in layer.named_buffers())]


def test_standard_equals_the_librarys_layer(layer):
    ours = swap(copy.deepcopy(layer), "standard", track_running_stats=False)
    assert type(ours).__module__ == "normplug.adapters"
    for x, training in product((X, LAST), (True, False)):
        for a, b in zip(run(ours, x, training), run(layer, x, training), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
            assert a.stride() == b.stride()


def test_the_input_may_be_passed_by_the_name_that_the_library_gives_it(layer):
    (name,) = inspect.signature(layer.forward).parameters
    ours = swap(copy.deepcopy(layer).eval())
    expected = layer.eval()(**{name: X})
    torch.testing.assert_close(ours(**{name: X}), expected)
    with pytest.raises(TypeError, match="wrong"):
        ours(wrong=X)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:normplug. .* gets a weight of")
def test_golden_is_the_layer_with_a_scaled_weight_and_unswaps_to_it(layer, training):
    ours = swap(copy.deepcopy(layer), "golden")
    assert [row.becomes for row in plan(ours)] == [type(layer).__name__]
    if layer.weight is None:
        shape = _convert.declared(layer)._affine_shape(layer)
        layer.weight = nn.Parameter(torch.full(shape, ROOT), requires_grad=False)
    else:
        layer.weight.data.mul_(ROOT)
    torch.manual_seed(1)
    expected = layer.train(training)(X)
    torch.manual_seed(1)
    torch.testing.assert_close(ours.train(training)(X), expected)
    back = unswap(copy.deepcopy(ours))
    assert type(back) is type(layer)
    assert vars(back).keys() == vars(layer).keys()
    torch.testing.assert_close(back.eval()(X), layer.eval()(X))


def test_fx_traces_the_layer_as_one_node(layer):
    swap(layer, "golden").eval()
    graph = fx.symbolic_trace(nn.Sequential(layer, nn.Tanh()))
    assert [node.op for node in graph.graph.nodes].count("call_module") == 2
    torch.testing.assert_close(graph(X), layer(X).tanh())


class AddThenNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, y):
        return self.norm(x + y).relu()


def test_fuse_keeps_what_an_adapter_adds(layer):
    model = swap(AddThenNorm(layer), "golden").eval()
    expected = model(X, X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there may be nothing to fuse
        fuse(model)
    assert torch.equal(model(X, X), expected)


def test_a_norm_with_an_activation_is_synchronised_with_it(layers):
    layer = layers.BatchNormAct2d(8)
    expected = swap(copy.deepcopy(layer), "golden")(X)
    assert [row.becomes for row in plan(layer, sync=True)] == ["SyncBatchNormAct2d"]
    swap(layer, "golden", sync=True)
    assert torch.equal(layer(X), expected)
    assert check(nn.Sequential(layer), X)
    assert type(unswap(layer, fold=False)) is layers.BatchNormAct2d


def test_a_copy_and_a_pickle_equal_the_layer(layer):
    library_class = type(layer)
    swap(layer, "golden").eval()
    assert isinstance(layer, library_class)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(again) is type(layer)
        assert str(again) == str(layer)
        assert torch.equal(again(X), layer(X))


PICKLED = [
    (timm_layer("BatchNormAct2d", 8), False),
    (timm_layer("BatchNormAct2d", 8), True),
    (transformers_layer("ConvNextLayerNorm", "convnext"), False),
    (layer_of(LLAMA, "LlamaRMSNorm", 8), False),
]
LOAD = """
import pickle, sys, normplug
for path in sys.argv:
    layer = pickle.load(open(path, "rb"))
    print(layer.mode, type(normplug.unswap(layer)))
"""


def test_pickles_load_in_a_process_that_has_swapped_nothing(tmp_path):
    expected, paths = [], []
    for made, sync in PICKLED:
        (make,) = made.values
        layer = make()
        expected.append(f"golden {type(layer)}")
        swap(layer, "golden", sync=sync)
        paths.append(tmp_path / str(len(paths)))
        paths[-1].write_bytes(pickle.dumps(layer))
    ran = program(LOAD, *paths)
    assert ran.stdout.splitlines() == expected, ran.stderr


def test_hooks_on_the_activation_or_the_dropout_are_called(layers):
    layer = swap(layers.BatchNormAct2d(8, inplace=False), "golden")
    seen = []
    with nn.modules.module.register_module_forward_hook(
        lambda m, *_: seen.append(type(m))
    ):
        layer(X)
    assert seen == [nn.Identity, nn.ReLU, type(layer)]
    kinds = ("forward", "forward_pre", "full_backward")
    for part, hook in [*(("act", kind) for kind in kinds), ("drop", "forward")]:
        calls = []
        hooked = copy.deepcopy(layer)
        getattr(getattr(hooked, part), f"register_{hook}_hook")(
            lambda *_: calls.append(1)  # noqa: B023
        )
        hooked(X).sum().backward()
        assert calls == [1], (part, hook)


FUSED = ("relu", "silu", "gelu", "relu6", "hard_swish")


@pytest.mark.parametrize(("act", "calls"), [*((act, 0) for act in FUSED), ("tanh", 1)])
def test_only_activations_that_the_kernels_know_are_fused(
    layers, act, calls, monkeypatch
):
    layer = swap(layers.BatchNormAct2d(8, act_layer=act), "golden")
    made = []
    forward = type(layer.act).forward
    monkeypatch.setattr(
        type(layer.act), "forward", lambda *a: made.append(1) or forward(*a)
    )
    layer(X)
    assert len(made) == calls


def test_variance_is_measured_before_the_activation(layers):
    layer = swap(layers.BatchNormAct2d(8), "golden")
    layer._probe = Probe()
    y = layer(X)
    torch.testing.assert_close(
        averages([layer._probe])[0][2].item(), ROOT**2, rtol=1e-4, atol=0
    )
    assert (y >= 0).all()
    stock = nn.Sequential(layers.BatchNormAct2d(8))
    assert [name for name, _ in norm_layers(stock)] == ["0"]


@pytest.mark.parametrize("mode", ["standard", "golden"])
def test_float32_layers_keep_the_inputs_dtype_under_autocast(layers, mode):
    for make in (layers.LayerNorm2dFp32, layers.LayerNormAct2dFp32):
        layer = make(8).to(torch.bfloat16)
        expected = copy.deepcopy(layer)
        expected.weight.data = expected.weight.float() * (ROOT if mode == "golden" else 1)
        swap(layer, mode)
        for dtype in (torch.bfloat16, torch.float32):
            with torch.autocast("cpu", torch.bfloat16):
                got, want = layer(X.to(dtype)), expected(X.to(dtype))
            assert got.dtype == dtype
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("act", ["relu", "tanh"])
def test_a_compiled_layer_is_one_graph(layers, act):
    layer = swap(layers.BatchNormAct2d(8, act_layer=act, inplace=False), "golden").eval()
    torch.testing.assert_close(one_graph(layer)(X), layer(X))


def test_unknown_subclasses_and_frozen_norms_are_left_and_plan_says_why(layers):
    misc = pytest.importorskip("torchvision.ops.misc")

    class Mine(layers.BatchNormAct2d):
        pass

    class Other(misc.FrozenBatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    Other.__name__ = "OtherFrozenBatchNorm2d"
    model = nn.Sequential(
        Mine(8), Other(8), layers.FrozenBatchNormAct2d(8), layers.SimpleNorm2d(8)
    )
    frozen = (
        "frozen batch norm: it uses stored statistics, so there is no variance to set"
    )
    assert [
        (row.becomes, row.note.removeprefix("nothing to do: ")) for row in plan(model)
    ] == [
        (
            None,
            "inherits timm.BatchNormAct2d.forward: set its __class__ to timm.BatchNormAct2d, "
            "then swap",
        ),
        (None, frozen),
        (None, frozen),
        (
            None,
            "it divides by the standard deviation about a mean that it does not subtract",
        ),
    ]


def test_another_version_of_a_forward_is_run_and_a_class_that_is_no_layer_norm_is_left():
    class Doubles(nn.LayerNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    module = "transformers.models.seggpt.modeling_seggpt"
    theirs, stranger = (
        type("SegGptLayerNorm", (base,), {"__module__": module})
        for base in (Doubles, nn.Module)
    )
    layer = theirs(6)
    expected = 2 * ROOT * nn.functional.layer_norm(X, (6,))
    torch.testing.assert_close(swap(layer, "golden")(X), expected)
    torch.testing.assert_close(unswap(layer)(X), expected)
    assert _convert.replacement(stranger()) is None
