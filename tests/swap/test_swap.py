import copy
import pickle
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import normplug
from normplug import (
    BatchNorm1d,
    BatchNorm2d,
    LayerNorm,
    plan,
    set_mode,
    swap,
    target_variance,
    unswap,
)

GOLDEN = target_variance("golden")


class Net(nn.Module):
    """One norm of each kind, a shared one, and an alias."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flat = nn.BatchNorm1d(8)
        self.norm = nn.LayerNorm(8)
        self.again = self.norm
        self.head = nn.Sequential(nn.Linear(8, 8), self.norm, nn.Linear(8, 4))

    def forward(self, x):
        x = self.flat(self.pool(self.stem(x)).flatten(1))
        return self.head(self.again(x))


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = Net()
    for parameter in net.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1, 0.3)
    return net


X = torch.randn(16, 3, 6, 6)


def train_step(model, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    loss = model(torch.randn(16, 3, 6, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def folded(model, tv):
    """The stock model that a swapped one must equal: sqrt(tv) in every norm weight."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)):
            with torch.no_grad():
                module.weight.mul_(tv**0.5)
    return model


def frozen(model):
    """All that a refused call must leave: classes, attributes, values and identities."""
    return [
        (
            path,
            type(m),
            sorted(vars(m)),
            dict(m._parameters),
            {k: id(v) for k, v in m._buffers.items()},
        )
        for path, m in model.named_modules(remove_duplicate=False)
    ], {k: v.clone() for k, v in model.state_dict().items()}


def assert_frozen(model, before):
    layers, values = frozen(model)
    for now, then in zip(layers, before[0], strict=True):
        assert now[:3] == then[:3]
        assert all(now[3][k] is then[3][k] for k in then[3])
        assert now[4] == then[4]
    for key, value in before[1].items():
        assert torch.equal(values[key], value), key


@pytest.mark.parametrize("mode", ["golden", 0.5, "standard"])
@pytest.mark.parametrize("training", [True, False])
def test_a_swapped_model_is_the_folded_stock_model(net, mode, training):
    tv = target_variance(mode)
    expected = folded(net, tv).train(training)
    assert swap(net.train(training), mode) is net
    torch.testing.assert_close(net(X), expected(X))
    torch.testing.assert_close(net.stem[1].running_var, expected.stem[1].running_var)


def test_modules_parameters_buffers_hooks_and_flags_survive(net):
    calls = []
    net.norm.register_forward_hook(lambda *_: calls.append("forward"))
    net.norm.register_forward_pre_hook(lambda *_: calls.append("pre"))
    net.norm.register_full_backward_hook(lambda *_: calls.append("backward"))
    net.norm.register_full_backward_pre_hook(lambda *_: calls.append("pre-backward"))
    net.norm.weight.register_hook(lambda *_: calls.append("gradient"))
    net.flat.register_state_dict_pre_hook(lambda *_: calls.append("state"))
    net.flat.register_state_dict_post_hook(lambda *_: calls.append("post-state"))
    net.flat.register_load_state_dict_pre_hook(lambda *_: calls.append("pre-load"))
    net.flat.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
    net.flat.weight.requires_grad_(False)
    net.flat.eval()
    net.norm.note = "mine"
    modules = {path: id(m) for path, m in net.named_modules()}
    tensors = {k: id(v) for k, v in [*net.named_parameters(), *net.named_buffers()]}
    swap(net)
    assert {path: id(m) for path, m in net.named_modules()} == modules
    after = {k: id(v) for k, v in [*net.named_parameters(), *net.named_buffers()]}
    assert {k: after[k] for k in tensors} == tensors
    assert net.again is net.norm is net.head[1]
    assert not net.flat.training
    assert net.stem[1].training
    assert not net.flat.weight.requires_grad
    assert net.norm.note == "mine"
    net(X).sum().backward()
    net.load_state_dict(net.state_dict())
    assert Counter(calls) == {
        **{"pre": 2, "forward": 2, "pre-backward": 2, "backward": 2, "gradient": 1},
        **{"state": 1, "post-state": 1, "pre-load": 1, "load": 1},
    }


def test_settings_buffers_and_children_of_a_layer_survive():
    norm = nn.BatchNorm2d(4, eps=0.1, momentum=None, affine=False, track_running_stats=False)
    norm.register_buffer("mine", torch.ones(3), persistent=False)
    norm.child = nn.Linear(2, 2)
    keys = set(norm.state_dict())
    swap(norm)
    assert (norm.eps, norm.momentum, norm.running_mean) == (0.1, None, None)
    assert torch.equal(norm.mine, torch.ones(3))
    assert set(norm.state_dict()) == keys == {"child.weight", "child.bias"}
    x = torch.randn(8, 4, 3, 3)
    expected = nn.BatchNorm2d(4, eps=0.1, affine=False)(x) * GOLDEN**0.5
    torch.testing.assert_close(norm.eval()(x), expected)  # no statistics: the batch's, in eval too


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_swapped_model_is_copied_and_saved_whole(net, way, tmp_path):
    swap(net, 0.5, exclude="flat")
    expected = copy.deepcopy(net.state_dict())
    if way == "deepcopy":
        twin = copy.deepcopy(net)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(net))
    else:
        torch.save(net, tmp_path / "net.pt")
        twin = torch.load(tmp_path / "net.pt", weights_only=False)
    assert twin.again is twin.norm is twin.head[1]
    assert normplug.check(twin).summary() == "2 norm layers in order: 2 in mode 0.5"
    torch.testing.assert_close(twin(X), net(X), rtol=0, atol=0)
    unswap(twin)
    assert type(twin.norm) is nn.LayerNorm
    assert type(net.norm) is LayerNorm
    assert net.state_dict().keys() == expected.keys()


def test_a_state_dict_loads_strictly_both_ways(net):
    plain, swapped_net = copy.deepcopy(net), swap(net, "standard")
    swapped_net.load_state_dict(plain.state_dict())
    kept = {k: v for k, v in swapped_net.state_dict().items() if k in plain.state_dict()}
    plain.load_state_dict(kept)
    torch.testing.assert_close(plain(X), swapped_net(X))


def test_a_running_optimizer_goes_on(net):
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    train_step(net, optimizer)
    swap(net)
    before = net.norm.weight.detach().clone()
    train_step(net, optimizer)
    assert not torch.equal(net.norm.weight, before)
    assert net.norm.weight in optimizer.state


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.LayerNorm(6)])
def test_the_root_itself(norm):
    norm = copy.deepcopy(norm)
    assert swap(norm) is norm
    assert norm.target_variance == GOLDEN
    assert str(plan(norm)).splitlines()[1].startswith("(the model itself)")


def test_swapping_twice_changes_nothing_and_another_mode_sets_it(net):
    swap(net)
    net(X)
    before = frozen(net)
    swap(net)
    assert_frozen(net, before)
    swap(net, 0.5)
    assert {row.module.target_variance for row in plan(net)} == {0.5}
    assert net.norm.num_batches_tracked == 2
    set_mode(net, "standard")
    assert {row.module.target_variance for row in plan(net)} == {1.0}


def classes(net):
    return {row.path: type(row.module) for row in plan(net)}


@pytest.mark.parametrize(
    ("filters", "swapped"),
    [
        ({}, {"stem.1", "flat", "norm"}),
        ({"include": "stem.*"}, {"stem.1"}),
        ({"include": ["stem.*", "fl?t"]}, {"stem.1", "flat"}),
        ({"exclude": "stem.*"}, {"flat", "norm"}),
        ({"exclude": "head.1"}, {"stem.1", "flat"}),  # any name of a shared layer counts
        ({"include": "*", "exclude": ["flat", "again"]}, {"stem.1"}),
        ({"include": r"re:(stem\.\d|norm)"}, {"stem.1", "norm"}),
        ({"exclude": nn.LayerNorm}, {"stem.1", "flat"}),
        ({"include": lambda path, m: getattr(m, "num_features", 0) == 8}, {"stem.1", "flat"}),
        ({"include": (nn.BatchNorm2d, "norm")}, {"stem.1", "norm"}),
    ],
)
def test_filters(net, filters, swapped):
    planned = {row.path for row in plan(net, **filters) if row.becomes}
    swap(net, **filters)
    assert planned == swapped
    taken = {path for path, cls in classes(net).items() if cls.__module__.startswith("normplug")}
    assert taken == swapped


def test_a_filter_that_matches_nothing(net):
    before = frozen(net)
    with pytest.raises(
        ValueError,
        match="include='layer9.*' matches no norm layer; the model has: stem.1, flat, norm",
    ):
        swap(net, include="layer9.*")
    with pytest.raises(ValueError, match="no regular expression"):
        swap(net, include="re:(")
    with pytest.raises(TypeError, match="include takes a glob"):
        swap(net, include=[3])
    assert_frozen(net, before)
    with pytest.warns(UserWarning, match="exclude='haed.*' matches no norm layer"):
        swap(net, exclude="haed.*")


def test_nothing_to_swap_warns_with_what_was_seen():
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.GroupNorm(2, 4))
    with pytest.warns(
        UserWarning, match=r"2 GroupNorm \(no normplug counterpart\), 1 InstanceNorm2d"
    ):
        assert swap(model) is model
    with pytest.warns(UserWarning, match="nothing to swap in Linear; norm layers seen: none"):
        swap(nn.Linear(2, 2))


def test_subclasses_and_other_norms_are_left_and_plan_says_so(net):
    class Odd(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    net.odd = Odd(4)
    net.rms = nn.RMSNorm(4)
    net.weighty = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    notes = {row.path: row.note for row in plan(net) if not row.becomes}
    assert notes == {
        "odd": "a subclass of nn.BatchNorm2d, which may have a forward of its own",
        "rms": "no normplug counterpart",
    }
    swap(net)
    assert type(net.odd) is Odd
    text = str(plan(net))
    assert "swapped already, mode golden; also again; also head.1" in text
    assert (
        "3 of 5 norm layers: 1 BatchNorm2d, 1 BatchNorm1d, 1 LayerNorm; left: 1 Odd (a sub" in text
    )


@pytest.mark.parametrize("mode", ["golden", 4])
def test_preserve_output_keeps_the_function_and_unswap_gives_it_back(net, mode):
    net.bare = nn.BatchNorm1d(4, affine=False)
    net.head.append(net.bare)
    net.eval()
    expected, keys = net(X), set(net.state_dict())
    swap(net, mode, preserve_output=True)
    torch.testing.assert_close(net(X), expected)
    assert net.bare.weight.requires_grad is False
    swap(net, 0.3, preserve_output=True)
    torch.testing.assert_close(net(X), expected)
    unswap(net)
    torch.testing.assert_close(net(X), expected)
    assert set(net.state_dict()) == keys
    assert all(type(row.module).__module__.startswith("torch") for row in plan(net))


@pytest.mark.parametrize("training", [True, False])
def test_unswap_folds_the_mode_away(net, training):
    net.head.append(nn.LayerNorm(4, elementwise_affine=False))
    swap(net).train(training)
    for _ in range(2):
        train_step(net)
    expected = copy.deepcopy(net)(X)
    assert unswap(net) is net
    torch.testing.assert_close(net(X), expected, rtol=1e-6, atol=1e-6)
    plain = pickle.dumps(net.stem)
    assert b"normplug" not in plain
    assert not any(
        "normplug" in key or key == "target_variance" for m in net.modules() for key in vars(m)
    )
    assert "norm.running_mean" not in net.state_dict()


def test_unswap_without_folding_is_bit_exact(net):
    before = frozen(net)
    swap(net)
    unswap(net, fold=False)
    assert_frozen(net, before)


def test_a_failing_swap_leaves_the_model_as_it_was(net, monkeypatch):
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net.encoder = encoder
    before = frozen(net)
    for bad in (
        {"mode": "gold"},
        {"backend": "cuda"},
        {"autocast_output": "half"},
    ):
        with pytest.raises(ValueError, match="normplug"):
            swap(net, **bad)
        assert_frozen(net, before)
    calls = []
    convert = normplug._convert.convert

    def fail_at_the_third(module, *args, **kwargs):
        calls.append(module)
        convert(module, *args, **kwargs)
        if len(calls) == 3:
            raise MemoryError("no room")

    monkeypatch.setattr(normplug._convert, "convert", fail_at_the_third)
    with pytest.raises(MemoryError):
        swap(net, preserve_output=True)
    assert_frozen(net, before)
    assert encoder.activation_relu_or_gelu == 1


def test_a_weight_shared_with_another_layer_is_not_scaled_behind_its_back():
    a, b = nn.LayerNorm(4), nn.LayerNorm(4)
    b.weight = a.weight
    model = nn.Sequential(a, b)
    with pytest.raises(ValueError, match="the weight of 0 is shared with 1, which would change"):
        swap(model, include="0", preserve_output=True)
    expected = model(torch.ones(2, 4).cumsum(1))
    swap(model, preserve_output=True)  # both: scaled once
    torch.testing.assert_close(model(torch.ones(2, 4).cumsum(1)), expected)
    unswap(model)
    torch.testing.assert_close(a.weight, torch.ones(4))
    assert a.weight is b.weight


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


def test_a_parametrized_layer_keeps_its_parametrization():
    norm = nn.BatchNorm1d(4)
    parametrize.register_parametrization(norm, "weight", Doubled())
    x = torch.randn(32, 4)
    expected = norm(x) * GOLDEN**0.5
    swap(norm)
    assert isinstance(norm, BatchNorm1d)
    assert parametrize.is_parametrized(norm, "weight")
    torch.testing.assert_close(norm(x), expected)
    with pytest.raises(ValueError, match="is parametrized; use remove_parametrizations"):
        unswap(norm)
    assert isinstance(norm, BatchNorm1d)
    parametrize.remove_parametrizations(norm, "weight")
    assert type(norm) is BatchNorm1d
    unswap(norm)
    assert type(norm) is nn.BatchNorm1d
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_torchs_own_parametrizations(name):
    norm = nn.LayerNorm((6, 4) if name == "orthogonal" else 6).eval()
    nn.init.normal_(norm.weight, 1, 0.3)
    getattr(nn.utils.parametrizations, name)(norm, "weight")
    x = torch.randn(5, *norm.normalized_shape)
    expected = norm(x)
    swap(norm)
    norm.eval()
    bias = norm.bias.expand_as(x)
    torch.testing.assert_close(norm(x), (expected - bias) * GOLDEN**0.5 + bias)
    normplug.check(norm)
    golden = norm(x)
    torch.testing.assert_close(copy.deepcopy(norm)(x), golden)
    parametrize.remove_parametrizations(norm, "weight")
    unswap(norm)
    assert type(norm) is nn.LayerNorm
    torch.testing.assert_close(norm(x), golden)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "prune"])
def test_a_weight_that_a_hook_computes_is_swapped_but_not_scaled_behind_its_back(how):
    norm = nn.LayerNorm((4, 6)).eval()
    remove = {
        "weight_norm": nn.utils.remove_weight_norm,
        "spectral_norm": nn.utils.remove_spectral_norm,
        "prune": lambda m: prune.remove(m, "weight"),
    }[how]
    if how == "prune":
        prune.random_unstructured(norm, "weight", amount=0.5)
    else:
        getattr(nn.utils, how)(norm)
    x = torch.randn(5, 4, 6)
    expected = norm(x) * GOLDEN**0.5
    swap(norm)
    torch.testing.assert_close(norm(x), expected)
    for refused in (unswap, lambda m: swap(m, 2, preserve_output=True)):
        with pytest.raises(ValueError, match="is no parameter but computed from one"):
            refused(norm)
    torch.testing.assert_close(norm(x), expected)
    remove(norm)
    torch.testing.assert_close(unswap(norm)(x), expected)


def test_a_forward_that_was_replaced_on_the_instance_is_left_and_said(net):
    forward = net.flat.forward
    net.flat.forward = lambda x: forward(x)
    swap(net)
    assert type(net.flat) is nn.BatchNorm1d
    assert "its forward was replaced on the instance" in str(plan(net))
    forward = net.norm.forward
    net.norm.forward = lambda x: forward(x)
    normplug.check(net)
    set_mode(net, 0.5)
    before = frozen(net)
    with pytest.raises(ValueError, match="the forward of norm was replaced on the instance"):
        unswap(net)
    assert_frozen(net, before)
    del net.norm.forward
    unswap(net)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_torchscript_is_refused_and_its_parts_are_left(net):
    traced = torch.jit.trace(net.eval(), X)
    for call in (swap, unswap, plan, normplug.check, lambda m: set_mode(m, 1)):
        with pytest.raises(TypeError, match="got .*, compiled TorchScript, whose layers cannot"):
            call(traced)
    model = nn.Sequential(traced, nn.LayerNorm(4))
    swap(model)
    assert type(model[1]) is LayerNorm
    assert ["0.flat", "BatchNorm1d", "-", "compiled", "TorchScript"] in [
        line.split() for line in str(plan(model)).splitlines()
    ]


def test_a_lazy_layer_becomes_one_at_its_first_forward():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="has no shape yet"):
        swap(model, preserve_output=True)
    swap(model)
    set_mode(model, 0.5)
    y = model(X)
    assert type(model[0]) is BatchNorm2d
    torch.testing.assert_close(
        y.var((0, 2, 3), correction=0), torch.full((3,), 0.5), rtol=1e-3, atol=0
    )
    unswap(model)
    assert type(model[0]) is nn.BatchNorm2d


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_transformer_encoder_validates_with_the_norms_it_trains(norm_first, padded):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a pre-norm encoder says that it will not nest tensors
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
        model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16))
    x, mask = torch.randn(3, 5, 16), None
    if padded:
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    swap(model)
    expected = model.train()(x, src_key_padding_mask=mask)
    real = torch.ones(3, 5, dtype=torch.bool) if mask is None else ~mask
    with torch.no_grad():
        got = model.eval()(x, src_key_padding_mask=mask)
        torch.testing.assert_close(got[real], expected[real])
        # What torch makes of padding in eval is its own affair, and the same after `unswap`.
        torch.testing.assert_close(unswap(model)(x, src_key_padding_mask=mask), got)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_takes_nested_tensors_as_before_the_swap(norm_first):
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
    model = swap(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16)))
    parts = [torch.randn(3, 16), torch.randn(5, 16)]
    expected = [model.train()(part[None])[0] for part in parts]
    with torch.no_grad():
        got = model.eval()(torch.nested.nested_tensor(parts)).unbind()
    torch.testing.assert_close(list(got), [y.detach() for y in expected])


def test_options_reach_the_layers(net):
    swap(net, track_running_stats=False, autocast_output="float32", backend="torch")
    assert net.norm.running_mean is None
    assert net.norm.autocast_output == "float32"
    assert {m.backend for m in (net.norm, net.flat, net.stem[1])} == {"torch"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_and_meta_device_are_kept(net, dtype):
    swap(net.to(dtype))
    assert net.norm.weight.dtype == dtype
    assert net.stem[1].running_var.dtype == dtype
    meta = swap(Net().to("meta"))
    assert {t.device.type for t in [*meta.parameters(), *meta.buffers()]} == {"meta"}


def test_what_is_no_model_is_refused():
    for call in (swap, unswap, plan, lambda m: set_mode(m, 1)):
        with pytest.raises(TypeError, match="must be an nn.Module; got dict"):
            call({})
    with pytest.raises(ValueError, match="has no normplug layers. Use normplug.swap"):
        set_mode(nn.Linear(2, 2), "golden")


def test_a_users_subclass_stays_and_unswap_says_so():
    class Mine(LayerNorm):
        pass

    model = nn.Sequential(Mine(4), LayerNorm(4))
    with pytest.warns(UserWarning, match="have no stock class to go back to and stay: 0"):
        unswap(model)
    assert type(model[0]) is Mine
    assert type(model[1]) is nn.LayerNorm


def test_a_compiled_model_follows_swap_mode_and_unswap(net):
    torch.compiler.reset()
    compiled = torch.compile(net.eval(), backend="aot_eager", fullgraph=True)
    plain = compiled(X)
    swap(net)
    golden = compiled(X)
    torch.testing.assert_close(golden, net(X))
    assert not torch.allclose(golden, plain)
    set_mode(net, 0.5)
    torch.testing.assert_close(compiled(X), net(X))
    unswap(net, fold=False)
    torch.testing.assert_close(compiled(X), plain)


def test_golden_sgd_is_the_stock_norm_with_a_scaled_start_and_rate(net):
    """The reparametrisation, so that a comparison needs its control arm."""
    scale = GOLDEN**0.5
    twin = folded(net, GOLDEN)
    swap(net)
    norms = [
        m for m in twin.modules() if isinstance(m, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm))
    ]
    weights = {id(m.weight) for m in norms}
    groups = [
        {"params": [p for p in twin.parameters() if id(p) in weights], "lr": 0.1 * GOLDEN},
        {"params": [p for p in twin.parameters() if id(p) not in weights]},
    ]
    ours, theirs = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(groups, 0.1)
    for _ in range(10):
        assert train_step(net, ours) == pytest.approx(train_step(twin, theirs), rel=1e-4)
    torch.testing.assert_close(net.norm.weight * scale, twin.norm.weight, rtol=1e-4, atol=1e-5)


class Trained(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("options", [{}, {"include": ["flat", "norm"]}, {"backend": "torch"}])
def test_swapped_puts_everything_back_but_what_was_trained(net, fails, options):
    net.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    before = frozen(net)
    try:
        with normplug.swapped(net, "golden", **options) as inside:
            assert inside is net
            assert type(net.norm) is LayerNorm
            if "include" not in options:
                assert type(net.encoder.norm1) is LayerNorm
            train_step(net)
            weight, mean = net.norm.weight.clone(), net.flat.running_mean.clone()
            if fails:
                raise Trained
    except Trained:
        assert fails
    assert torch.equal(net.norm.weight, weight)
    assert torch.equal(net.flat.running_mean, mean)
    assert net.encoder.activation_relu_or_gelu == 1
    net.load_state_dict(before[1])
    assert_frozen(net, before)


def test_swapped_gives_normplugs_layers_their_own_mode_and_options_back(net):
    swap(net, 0.5, include="norm", autocast_output="float32")
    net(X)
    before = frozen(net)
    with normplug.swapped(net, 2, backend="torch"):
        assert {row.module.target_variance for row in plan(net)} == {2.0}
        set_mode(net, 3)
    assert_frozen(net, before)
    assert (net.norm.target_variance, net.norm.backend, net.norm.autocast_output) == (
        0.5,
        "auto",
        "float32",
    )
    assert normplug.check(net).summary() == "1 norm layers in order: 1 in mode 0.5"
    with normplug.swapped(net), normplug.swapped(net, 2):
        unswap(net)
    assert all(type(row.module).__module__.startswith("torch") for row in plan(net))


def test_swapped_with_preserved_output_keeps_the_function_at_both_ends(net):
    net.bare = nn.BatchNorm1d(4, affine=False)
    net.head.append(net.bare)
    swap(net.stem, 0.5)
    net.eval()
    expected, before = net(X), frozen(net)
    with normplug.swapped(net, preserve_output=True):
        torch.testing.assert_close(net(X), expected)
        with torch.no_grad():
            net.norm.weight.mul_(3)
        trained = net(X)
    torch.testing.assert_close(net(X), trained)
    with torch.no_grad():
        net.norm.weight.div_(3)
    for now, then in zip(frozen(net)[0], before[0], strict=True):
        assert now[:3] == then[:3]
    torch.testing.assert_close(net(X), expected)


def test_swapped_takes_synchronisation_back_that_was_not_there(net):
    swap(net, 0.5, include="stem.*")
    swap(net, 0.5, include="flat", sync=True)
    before = frozen(net)
    with normplug.swapped(net, "golden", sync=True):
        synchronised = {type(m) for m in net.modules() if isinstance(m, nn.SyncBatchNorm)}
        assert synchronised == {normplug.SyncBatchNorm}
        assert type(net.stem[1]) is normplug.SyncBatchNorm
    assert_frozen(net, before)


def test_swapped_refuses_as_swap_does(net):
    before = frozen(net)
    for bad, error in (({"mode": "gold"}, ValueError), ({"include": "lyaer*"}, ValueError)):
        with pytest.raises(error), normplug.swapped(net, **bad):
            pass
        assert_frozen(net, before)
    with pytest.raises(TypeError, match="normplug.swapped: model must be an nn.Module"):
        normplug.swapped({}).__enter__()


def weightless():
    return nn.Sequential(
        nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False),
        nn.BatchNorm1d(6, affine=False), nn.Sequential(nn.LayerNorm(6, elementwise_affine=False)),
        nn.Linear(6, 4),
    )  # fmt: skip


def frozen_weights(model):
    return [model[1].weight, model[2].weight, model[3][0].weight]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", ["golden", 0.3])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_a_weight_made_for_a_layer_has_the_dtype_of_its_model(dtype, mode, training):
    model, x = weightless().to(dtype), torch.randn(32, 6, dtype=dtype)
    for _ in range(3):
        model(x)
    model.train(training)
    keys, expected = set(model.state_dict()), copy.deepcopy(model)(x)
    rounding = {"rtol": 0, "atol": 16 * torch.finfo(dtype).eps}
    swap(model, mode, preserve_output=True)
    assert {w.dtype for w in frozen_weights(model)} == {dtype}
    torch.testing.assert_close(copy.deepcopy(model)(x), expected, **rounding)
    unswap(model)  # takes the weights out again
    assert set(model.state_dict()) == keys
    torch.testing.assert_close(copy.deepcopy(model)(x), expected, rtol=0, atol=0)
    swap(model, mode)
    expected = copy.deepcopy(model)(x)
    unswap(model)
    assert {w.dtype for w in frozen_weights(model)} == {dtype}
    assert type(model[1]) is nn.LayerNorm
    torch.testing.assert_close(model(x), expected, **rounding)


def test_a_weight_made_for_a_layer_lies_where_its_neighbours_do():
    half, meta = {"dtype": torch.float16}, {"device": "meta"}
    model = nn.Sequential(
        nn.LayerNorm(6, elementwise_affine=False),
        nn.Sequential(nn.Linear(6, 6, **half), nn.LayerNorm(6, elementwise_affine=False)),
        nn.BatchNorm1d(6, affine=False, dtype=torch.float64),
        nn.ModuleList([nn.LayerNorm(6, elementwise_affine=False)]),
        nn.Sequential(nn.Linear(6, 6, **meta), nn.LayerNorm(6, elementwise_affine=False)),
        nn.Sequential(nn.ReLU(), nn.LayerNorm(6, elementwise_affine=False)),
    )
    swap(model)
    assert [model[i][-1].running_mean.device.type for i in (3, 4, 5)] == ["cpu", "meta", "meta"]
    unswap(model)
    norms = [m for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.BatchNorm1d))]
    assert [(m.weight.dtype, m.weight.device.type) for m in norms] == [
        (torch.float16, "cpu"),  # nothing is before it
        (torch.float16, "cpu"),
        (torch.float64, "cpu"),  # its own statistics
        (torch.float64, "cpu"),
        (torch.float32, "meta"),
        (torch.float32, "meta"),
    ]


def test_a_weight_made_for_a_layer_without_neighbours():
    bare = unswap(swap(nn.LayerNorm(6, elementwise_affine=False)))
    assert bare.weight.dtype == torch.float32
    beside = nn.Sequential(
        nn.BatchNorm1d(6, affine=False), nn.LayerNorm(6, elementwise_affine=False)
    )
    unswap(swap(beside.double()))  # a buffer, where there is no parameter
    assert {beside[0].weight.dtype, beside[1].weight.dtype} == {torch.float64}
    lost = swap(weightless().to("meta"), preserve_output=True)
    unswap(lost)  # there are no values to tell that the weights are ones again
    assert {w.device.type for w in frozen_weights(lost)} == {"meta"}


def swapped_for_a_moment(model):
    with normplug.swapped(model, preserve_output=True):
        pass
    swap(model)


CONVERSIONS = {
    "swap": swap,
    "swap, preserve_output": lambda model: swap(model, preserve_output=True),
    "swap, sync": lambda model: swap(model, sync=True),
    "unswap": lambda model: unswap(swap(model)),
    "unswap, preserve_output": lambda model: unswap(swap(model, preserve_output=True)),
    "set_mode": lambda model: set_mode(swap(model), 0.5),
    "swapped": swapped_for_a_moment,
    "fuse": lambda model: normplug.fuse(swap(model)),
    "unfuse": lambda model: normplug.unfuse(normplug.fuse(swap(model))),
    "check": lambda model: normplug.check(swap(model), X),
    "plan": plan,
}


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_in_inference_mode_makes_tensors_that_can_be_trained(name, made_inside):
    with torch.inference_mode():
        inside = Net()
    model = inside if made_inside else Net()
    model.head.append(nn.LayerNorm(4, elementwise_affine=False))
    model.bare = nn.BatchNorm1d(4, affine=False)
    model.head.append(model.bare)
    before = {id(t) for t in [*model.parameters(), *model.buffers()]}
    with torch.inference_mode():
        CONVERSIONS[name](model)
    made = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in before]
    assert not any(t.is_inference() for t in made)
    if made_inside:  # its own parameters are not to be trained, inside or outside
        CONVERSIONS[name](model)
        return
    for _ in range(2):
        train_step(model)
    twin = copy.deepcopy(pickle.loads(pickle.dumps(model)))
    torch.testing.assert_close(twin.eval()(X), model.eval()(X))


def test_a_failing_swap_in_inference_mode_leaves_the_model_as_it_was(net, monkeypatch):
    def fail(*args, **kwargs):
        raise MemoryError("no room")

    before = frozen(net)
    monkeypatch.setattr(normplug._convert, "convert", fail)
    with torch.inference_mode(), pytest.raises(MemoryError):
        swap(net, preserve_output=True)
    assert_frozen(net, before)
    train_step(net)
