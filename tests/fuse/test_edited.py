"""Norms are fused with the operation next to them by editing forwards that cannot be traced."""

import copy
import functools
import types

import pytest
import torch
from torch import nn

import normplug
from fuse_cases import ROWS, Parts, Resnet, X, assert_same_step, swapped, twins, written
from normplug import fuse, fusions, swap
from normplug.modules.probe import Probe
from zoo.check import observe

ADVICE = "to fuse, write the addition or activation right next to the norm"


class Mix(nn.Module):
    """Stands in for attention: takes keyword arguments and returns a tuple."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden, mask=None, **options):
        return self.linear(hidden if mask is None else hidden * mask), None


class PreNorm(nn.Module):
    """A language model's block, with an optional second input."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (norm(8) for _ in range(3))
        self.mix, self.mlp = Mix(), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))

    def forward(self, hidden, mask=None, context=None, **options):
        residual = hidden
        hidden = self.norm1(hidden)
        if context is not None:
            hidden = self.norm3(hidden + context)
        hidden, _ = self.mix(hidden=hidden, mask=mask, **options)
        hidden = residual + hidden
        residual = hidden
        hidden = self.norm2(hidden)
        hidden = self.mlp(hidden)
        return (residual + hidden,)


class Caller(nn.Module):
    """Calls its blocks with keyword arguments."""

    def __init__(self, *blocks, **options):
        super().__init__()
        self.blocks, self.options = nn.ModuleList(blocks), options

    def forward(self, x):
        for block in self.blocks:
            (x,) = block(x, **self.options)
        return x


OPTIONS = {"none": {}, "mask": {"mask": torch.tensor(0.5)}, "context": {"context": ROWS}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_block_that_takes_keyword_arguments_and_returns_a_tuple_is_fused(
    options, calls, traces
):
    model, plain = twins(Caller(PreNorm(), PreNorm(nn.RMSNorm), **options))
    found = {row.path: (row.label, row.note) for row in fusions(model)}
    left = f"PreNorm: its forward takes *args or **kwargs; {ADVICE}"
    assert found["blocks.1.norm1"] == (None, left)
    assert found["blocks.1.norm2"] == ("add before it", "")
    assert found["blocks.1.norm3"] == ("add before it (in a branch)", "")
    assert traces() == 0
    for training in (True, False):
        calls.clear()
        assert_same_step(model, plain, ROWS, training=training)
        assert calls == ["add before"] * (4 if "context" in options else 2)


@pytest.mark.parametrize(
    ("way", "count"), [("add", 2), ("other", 2), ("scale", 1), ("none", 1)]
)
def test_a_diffusion_models_block_is_fused_in_the_branches_that_call_its_norm(
    way, count, calls, traces
):
    model, plain = twins(Resnet(way))
    labels = {row.path: row.label for row in fusions(model)}
    assert labels == {"norm1": "SiLU", "norm2": "SiLU (in a branch)"}
    assert traces() == 0
    for training in (True, False):
        calls.clear()
        assert_same_step(model, plain, X, X.mean(), training=training)
        assert calls == ["silu"] * count
    assert torch.equal(model(X, None, 1, scale=2), plain(X))


class Sums(Parts):
    """Each method is a forward with an addition and a norm."""

    X = ROWS
    LAYERS = {  # noqa: RUF012
        "norm": lambda: nn.LayerNorm(8),
        "second": lambda: nn.LayerNorm(8),
        "line": lambda: nn.Linear(8, 8),
        "_Sums__hidden": lambda: nn.Linear(8, 8),
    }
    scale = property(lambda self: 2.0)

    def nested(self, x, **options):
        return self.norm(x + self.line(x))

    def annotated(self, x, **options):
        total: torch.Tensor = x + self.line(x)
        other = total
        x = x, other
        return self.line(self.norm(other)) + total

    def chained(self, x, **options):
        x = x + self.line(x)
        x = x + self.line(self.norm(x))
        return self.line(x)

    def branches(self, x, **options):
        if options is not None and self.flag:
            y = self.norm(x + self.line(x))
        elif not self.flag:
            y = self.second(x + self.line(x))
        return x * y

    def end_of_a_branch(self, x, other=1, **options):
        if other is not None:
            total = x
            x = self.line(x) + total
            other = x
        x = self.norm(x)
        return self.line(x)

    def if_between(self, x, other=None, **options):
        x = self.line(x) + x
        if other is not None:
            x = x * other
        return self.norm(x)

    def try_clause(self, x, **options):
        total = x + self.line(x)
        try:
            return self.norm(total)
        finally:
            total = None

    def read_first(self, x, **options):
        total = x + self.line(x)
        return self.line(total) + self.norm(total)

    def property_first(self, x, **options):
        total = x + self.line(x)
        return self.scale * self.norm(total)

    def reassigned(self, x, **options):
        total = x + self.line(x)
        total = x
        return self.norm(total)

    def sum_in_a_condition(self, x, **options):
        total = x + self.line(x)
        if total is not None:
            return self.norm(total)
        return x

    def private_attribute(self, x, **options):
        return self.norm(x + self.__hidden(x))

    def inside_a_function(self, x, **options):
        def both(self, x):
            return self.norm(x + self.line(x))

        return both(self, x)

    def other_self(self, x, **options):
        self, module = self.line, self
        return module.norm(x + self(x))


class Activations(Parts):
    """Each method is a forward with a norm and an activation."""

    X = X
    LAYERS = {  # noqa: RUF012
        "norm": lambda: nn.GroupNorm(2, 8),
        "second": lambda: nn.BatchNorm2d(8),
        "line": lambda: nn.Conv2d(8, 8, 1),
        "act": nn.SiLU,
    }

    def nested(self, x, **options):
        return self.line(self.act(self.norm(x)))

    def inside_expressions(self, x, **options):
        x = self.norm(x)
        x = (
            self.line(self.act(x)) + x.shape[0]
            if self.flag is None
            else self.line(self.act(x))
        )
        x = self.second(self.line(x))
        return self.line(self.act(x))

    def chained(self, x, **options):
        x = self.norm(x)
        x = self.second(self.act(x))
        x = self.act(x)
        return self.line(x)

    def if_statement(self, x, **options):
        y = self.norm(x)
        if self.flag and options is not None:
            y = self.act(y)
        return y * 2

    def optional_activation(self, x, **options):
        x = self.norm(x)
        if self.second is not None:
            x = self.act(x)
        return x

    def for_loop(self, x, **options):
        for i in range(3):
            if i != 1:
                x = self.norm(x)
            x = self.act(x)
            x = self.line(x)
        return x

    def new_name(self, x, **options):
        y = self.norm(x)
        z = self.act(y)
        return z + x

    def read_later(self, x, **options):
        y = self.norm(x)
        z = self.act(y)
        return y + z

    def aliased(self, x, **options):
        x = self.norm(x)
        y = x
        x = self.act(x)
        return x + y

    def closure(self, x, **options):
        x = self.norm(x)
        later = lambda: x  # noqa: E731
        return self.act(x) + later()


EDITED = {
    **dict.fromkeys(
        [(Sums, name) for name in ("nested", "annotated", "chained", "branches")], 1
    ),
    **dict.fromkeys([(Sums, name) for name in ("end_of_a_branch", "if_between")], 1),
    **dict.fromkeys(
        [(Activations, name) for name in ("nested", "inside_expressions")], 1
    ),
    **dict.fromkeys(
        [(Activations, name) for name in ("new_name", "optional_activation")], 1
    ),
    **dict.fromkeys([(Activations, name) for name in ("chained", "for_loop")], 2),
}
LEFT = [
    (cls, name)
    for cls in (Sums, Activations)
    for name, f in vars(cls).items()
    if isinstance(f, types.FunctionType) and (cls, name) not in EDITED
]


def made(cls, name):
    layers = {part: make() for part, make in cls.LAYERS.items()}
    return written(cls, name, **layers, flag=True)


@pytest.mark.parametrize(("cls", "name"), EDITED)
def test_a_statement_is_edited_if_the_order_of_evaluation_does_not_matter(
    cls, name, calls
):
    model, plain = twins(made(cls, name))
    assert_same_step(model, plain, cls.X)
    assert calls == ["add before" if cls is Sums else "silu"] * EDITED[cls, name]
    for other in (None, 2.0):
        assert torch.equal(model(cls.X, other=other), plain(cls.X, other=other))
    model.flag = plain.flag = False
    assert_same_step(model, plain, cls.X)


@pytest.mark.parametrize(("cls", "name"), LEFT)
def test_other_statements_are_left_and_the_reason_is_given(cls, name, calls):
    with pytest.warns(UserWarning, match="nothing to fuse"):
        model, plain = twins(made(cls, name))
    notes = {row.path: row.note for row in fusions(model)}
    untraced = "Written: its forward takes *args or **kwargs"
    refused = ("other_self", "private_attribute", "try_clause")
    assert notes["norm"] == (untraced if name in refused else f"{untraced}; {ADVICE}")
    assert_same_step(model, plain, cls.X)
    assert calls == []


class Deciding(Parts):
    """Each method is a forward whose sum decides the test of the `if` after it."""

    X = ROWS
    LAYERS = {"norm": lambda: nn.LayerNorm(8), "line": lambda: nn.Linear(8, 8)}  # noqa: RUF012
    seen = None

    def into(self, x, cache):
        cache["x"] = x
        self.seen = x
        return self.line(x)

    def truth(self, x, **options):
        cache = {}
        x = x + self.into(x, cache)
        if cache:
            x = x + 2
        return self.norm(x)

    def attribute(self, x, **options):
        self.seen = None
        x = x + self.into(x, {})
        if self.seen is not None:
            x = x + 2
        return self.norm(x)

    def walrus(self, x, **options):
        found = None
        x = x + (found := self.line(x))
        if found is not None:
            x = x + 2
        return self.norm(x)


@pytest.mark.parametrize("name", ["truth", "attribute", "walrus"])
def test_a_sum_stays_before_a_test_that_it_decides(name):
    with pytest.warns(UserWarning, match="nothing to fuse"):
        model, plain = twins(made(Deciding, name))
    for _ in range(2):
        assert_same_step(model, plain, ROWS)


class Outside(Parts):
    def forward(self, x, **options):
        global FEATURES
        FEATURES = self.norm(x)
        return self.act(FEATURES)


def test_a_forward_that_assigns_to_a_global_variable_is_left():
    with pytest.warns(UserWarning, match="nothing to fuse"):
        model, _ = twins(Outside(norm=nn.BatchNorm2d(8), act=nn.ReLU()))
    model(X)
    assert FEATURES.min() < 0


def doubling(function):
    @functools.wraps(function)
    def twice(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return twice


def listed(function):
    functions = [function]

    @functools.wraps(function)
    def call(*args, **kwargs):
        return functions[0](*args, **kwargs)

    return call


class Super(Parts):
    offset = 1.0

    def forward(self, x, /, *rest, scale=2.0):
        return x * scale


class Decorated(Super):
    @doubling
    @torch.enable_grad()
    def forward(self, x, *rest, scale=3.0):
        x = self.norm(self.line(x) + super().forward(x, *rest, scale=scale))
        return x + self.offset


class Hidden(Super):
    @listed
    def forward(self, x):
        return self.norm(self.line(x) + x)


def test_decorators_stay_around_an_edited_forward(calls):
    model, plain = twins(Decorated(norm=nn.LayerNorm(8), line=nn.Linear(8, 8)))
    assert_same_step(model, plain, ROWS)
    assert torch.equal(model(ROWS, 1, scale=0.5), plain(ROWS, 1, scale=0.5))
    assert calls == ["add before"] * 2
    with pytest.warns(UserWarning, match="its forward is decorated"):
        fuse(swapped(Hidden(norm=nn.LayerNorm(8), line=nn.Linear(8, 8))))


class Masked(Parts):
    def forward(self, x, mask=None):
        if mask is not None:
            x = x * mask
        x = x + self.line(x)
        return x + self.norm(x)


def test_a_call_that_the_trace_does_not_cover_runs_the_edited_forward(calls, traces):
    model, plain = twins(Masked(norm=nn.LayerNorm(8), line=nn.Linear(8, 8)))
    assert traces() == 1
    mask = torch.ones(3, 1, dtype=torch.double)
    by_name = [{"x": ROWS, "mask": given} for given in (mask, None)]
    for arguments, named in (
        ((ROWS,), {}),
        ((ROWS, mask), {}),
        *(((), each) for each in by_name),
    ):
        calls.clear()
        assert torch.equal(model(*arguments, **named), plain(*arguments, **named))
        assert calls == ["add before"]
    with pytest.raises(TypeError):
        model()
    for each in (model, plain):
        each.line = nn.Tanh()
    assert torch.equal(model(ROWS), plain(ROWS))
    assert len(calls) == 2
    assert [row.label for row in fusions(model)] == ["add before it"]


# Changes to a fused block, and how many of its norms are then still fused.
CHANGES = {
    "a hook": (lambda block: block.norm2.register_forward_hook(lambda m, a, y: 2 * y), 0),
    "another norm": (lambda block: setattr(block, "norm2", nn.Tanh()), 0),
    "a probe": (lambda block: setattr(block.norm2, "_probe", Probe()), 0),
}


def without_act_child(block):
    """Let the block's activation be an attribute that is no module."""
    del block._modules["act"]
    block.act = torch.tanh


RESNET_CHANGES = {
    "a function as the activation": (without_act_child, 0),
    "a hook on the activation": (lambda block: block.act.register_forward_hook(print), 0),
    "another activation": (lambda block: setattr(block, "act", nn.Tanh()), 0),
    "a fusible activation": (
        lambda block: setattr(block, "act", nn.ReLU(inplace=True)),
        2,
    ),
    "a LayerNorm": (
        lambda block: setattr(block, "norm1", swap(nn.LayerNorm(5).double())),
        1,
    ),
    "another branch": (lambda block: setattr(block, "way", "scale"), 1),
}


CASES = {
    **{
        name: (Caller(PreNorm()), ROWS, "blocks.0", *case)
        for name, case in CHANGES.items()
    },
    **{
        f"resnet, {name}": (Resnet(), X, "", *case)
        for name, case in RESNET_CHANGES.items()
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_changed_block_computes_what_it_would_unfused(case, calls):
    block, x, path, apply, fused = case
    model, plain = twins(copy.deepcopy(block))
    for each in (model, plain):
        apply(each.get_submodule(path))
    assert_same_step(model, plain, x)
    assert len(calls) == fused
    assert sum(row.label is not None for row in fusions(model)) >= fused


class Pair(Parts):
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
        memory = self.encoder(x, mask=mask, is_causal=True)
        return self.decoder(x, memory, tgt_mask=mask)


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_transformer_layers_are_fused(norm_first, calls):
    options = {"batch_first": True, "norm_first": norm_first}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, **options), 2, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoderLayer(8, 2, 16, **options)
    model, plain = twins(Pair(encoder=encoder, decoder=decoder))
    labels = {row.label for row in fusions(model.encoder)}
    assert labels == {"add before it (in a branch)"}
    for training in (True, False):
        calls.clear()
        assert_same_step(model, plain, ROWS, training=training)
        assert calls == ["add before"] * (4 if norm_first else 7)
    with torch.no_grad():
        assert torch.equal(model(ROWS), plain(ROWS))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_fused_transformer_layer_computes_nested_tensors_unfused(calls):
    model, plain = twins(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    x = torch.nested.nested_tensor([ROWS[0], ROWS[1, :2]])
    with torch.no_grad():
        ours, theirs = model(x).unbind(), plain(x).unbind()
    assert all(map(torch.equal, ours, theirs))
    assert calls == []


@pytest.mark.parametrize(
    ("library", "name", "fused", "norms"),
    [
        ("transformers", "bert", 5, 5),
        ("transformers", "gpt2", 2, 5),
        ("transformers", "vit", 2, 5),
        ("transformers", "whisper", 6, 12),
        ("transformers", "llama", 2, 5),
        ("diffusers", "UNet2DModel", 17, 21),
        ("diffusers", "AutoencoderKL", 22, 24),
        ("diffusers", "UNet2DConditionModel", 25, 33),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_models_of_libraries_are_fused_and_give_the_same_bits(
    library, name, fused, norms
):
    listed = pytest.importorskip(
        f"zoo.{library}_models", exc_type=ImportError
    ).architectures()
    architecture = next(a for a in listed if a.name == name)
    torch.manual_seed(0)
    plain = swap(architecture.build())
    model = fuse(copy.deepcopy(plain))
    rows = list(fusions(model))
    assert (sum(row.label is not None for row in rows), len(rows)) == (fused, norms)
    if library == "diffusers":
        assert model.to_json_string() == plain.to_json_string()
    inputs = architecture.inputs(model)
    ours, theirs = observe(model, inputs), observe(plain, inputs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert normplug.check(model)
