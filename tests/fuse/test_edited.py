"""Norms are fused with the addition before them by editing forwards that cannot be traced."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuse_cases import ROWS, Parts, Resnet, X, assert_same_step, outcome, swapped, twins
from normplug import fuse, fusions, swap, unfuse
from normplug._fuse.edit import REASON
from normplug._fuse.fuse import fused_modules
from normplug.modules.probe import Probe
from zoo.check import observe


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
def test_a_block_that_takes_keyword_arguments_and_returns_a_tuple_is_fused(options, calls, traces):
    model, plain = twins(Caller(PreNorm(), PreNorm(nn.RMSNorm), **options))
    found = {row.path: (row.label, row.note) for row in fusions(model)}
    left = f"PreNorm: its forward takes *args or **kwargs, and {REASON}"
    assert found["blocks.1.norm1"] == (None, left)
    assert found["blocks.1.norm2"] == found["blocks.1.norm3"] == ("add before it", "")
    assert traces() == 0
    for training in (True, False):
        calls.clear()
        assert_same_step(model, plain, ROWS, training=training)
        assert calls == ["add before"] * (4 if "context" in options else 2)


class Statements(Parts):
    """Each method is a forward whose statements are edited, or left alone."""

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

    def property_in_a_condition(self, x, **options):
        x = x + self.line(x)
        if self.scale is None:
            x = x * 2
        return self.norm(x)

    def try_clause(self, x, **options):
        total = x + self.line(x)
        try:
            return self.norm(total)
        finally:
            total = None

    def in_place(self, x, **options):
        x = x * 2
        x += self.norm.bias
        return self.norm(x)

    def changed_between(self, x, **options):
        total = x + self.line(x)
        total.mul_(2)
        return self.norm(total)

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

    def constant(self, x, **options):
        return self.norm(1.0 + self.line(x))

    def keyword_argument(self, x, **options):
        return self.norm(input=x + self.line(x))

    def inside_a_function(self, x, **options):
        def both(self, x):
            return self.norm(x + self.line(x))

        return both(self, x)

    def other_self(self, x, **options):
        self, module = self.line, self
        return module.norm(x + self(x))


EDITED = ("nested", "annotated", "chained", "branches", "end_of_a_branch", "if_between")
LEFT = [
    name
    for name, f in vars(Statements).items()
    if callable(f) and name not in EDITED and not name.startswith("_")
]


def statements(name):
    cls = type("Written", (Statements,), {"forward": vars(Statements)[name]})
    return cls(norm=nn.LayerNorm(8), second=nn.LayerNorm(8), line=nn.Linear(8, 8), flag=True)


@pytest.mark.parametrize("name", EDITED)
def test_a_statement_is_edited_if_the_order_of_evaluation_does_not_matter(name, calls):
    model, plain = twins(statements(name))
    assert_same_step(model, plain, ROWS)
    assert calls == ["add before"]
    for other in (None, 2.0):
        assert torch.equal(model(ROWS, other=other), plain(ROWS, other=other))


def test_a_branch_that_attributes_exclude_is_not_reported():
    for flag in (True, False):
        block = statements("branches")
        block.flag = flag
        labels = [row.label for row in fusions(fuse(swapped(block)))]
        assert labels == ["add before it" if flag else None, None if flag else "add before it"]


@pytest.mark.parametrize("name", LEFT)
def test_other_statements_are_left_and_the_reason_is_given(name, calls):
    with pytest.warns(UserWarning, match="nothing to fuse"):
        model, plain = twins(statements(name))
    notes = {row.path: row.note for row in fusions(model)}
    untraced = "Written: its forward takes *args or **kwargs"
    assert notes["norm"] == (untraced if name == "other_self" else f"{untraced}, and {REASON}")
    assert_same_step(model, plain, ROWS)
    assert calls == []


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


def test_a_forward_whose_code_differs_from_its_source_is_left():
    model = statements("nested")
    forward = type(model).forward
    code = forward.__code__.replace(co_consts=(*forward.__code__.co_consts, 2.0))
    type(model).forward = type(forward)(code, forward.__globals__)
    with pytest.warns(UserWarning, match="nothing to fuse"):
        fuse(swapped(model))


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
    for arguments, named in (((ROWS,), {}), ((ROWS, mask), {}), ((), {"x": ROWS, "mask": mask})):
        calls.clear()
        assert torch.equal(model(*arguments, **named), plain(*arguments, **named))
        assert calls == ["add before"]
    for each in (model, plain):
        each.line = nn.Tanh()
    assert torch.equal(model(ROWS), plain(ROWS))
    assert len(calls) == 2
    assert [row.label for row in fusions(model)] == ["add before it"]


# Changes to a fused block, and how many of its norms are then still fused.
CHANGES = {
    "nothing": (lambda block: None, 1),
    "a hook": (lambda block: block.norm2.register_forward_hook(lambda m, a, y: 2 * y), 0),
    "a hook on the block": (lambda block: block.register_forward_hook(lambda m, a, y: y), 1),
    "another norm": (lambda block: setattr(block, "norm2", nn.Tanh()), 0),
    "another MLP": (lambda block: setattr(block, "mlp", nn.Tanh()), 1),
    "a probe": (lambda block: setattr(block.norm2, "_probe", Probe()), 0),
}


def without_act_child(block):
    """Let the block's activation be an attribute that is no module."""
    del block._modules["act"]
    block.act = torch.tanh


RESNET_CHANGES = {
    "a function as the activation": (without_act_child, 0),
    "a hook": (lambda block: block.norm2.register_forward_hook(lambda m, a, y: 2 * y), 1),
    "a hook on the activation": (lambda block: block.act.register_forward_hook(print), 0),
    "another activation": (lambda block: setattr(block, "act", nn.Tanh()), 0),
    "a fusible activation": (lambda block: setattr(block, "act", nn.ReLU(inplace=True)), 2),
    "another norm": (lambda block: setattr(block, "norm1", nn.Tanh()), 1),
    "a LayerNorm": (lambda block: setattr(block, "norm1", swap(nn.LayerNorm(5).double())), 1),
    "a probe": (lambda block: setattr(block.norm2, "_probe", Probe()), 1),
    "another branch": (lambda block: setattr(block, "way", "scale"), 1),
}


CASES = {
    **{name: (Caller(PreNorm()), ROWS, "blocks.0", *case) for name, case in CHANGES.items()},
    **{f"resnet, {name}": (Resnet(), X, "", *case) for name, case in RESNET_CHANGES.items()},
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


def test_global_module_hooks_see_the_norm(calls):
    model, seen = fuse(swapped(Caller(PreNorm()))), []
    with nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(m)):
        outcome(model, ROWS)
    assert model.blocks[0].norm2 in seen
    assert calls == []


def test_a_forward_that_was_patched_on_the_class_is_called(monkeypatch):
    model = fuse(swapped(PreNorm()))
    monkeypatch.setattr(PreNorm, "forward", lambda self, x: x * 2)
    assert torch.equal(model(ROWS), ROWS * 2)
    assert not any(row.label for row in fusions(model))


BLOCKS = {
    "addition": (Caller(PreNorm()), ROWS, ["add before"], "blocks.0"),
    "activation": (nn.Sequential(Resnet()), X, ["silu"] * 2, "0"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_copies_are_edited_like_the_model(name, calls):
    block, x, made, path = BLOCKS[name]
    model = fuse(swapped(copy.deepcopy(block)))
    copied = copy.deepcopy(model)
    assert_same_step(copied, unfuse(copy.deepcopy(model)), x)
    assert calls == made
    assert str(fusions(copied)) == str(fusions(model))
    assert list(copied.state_dict()) == list(model.state_dict())
    assert type(model.get_submodule(path)).__qualname__ in ("PreNorm", "Resnet")
    assert not fused_modules(unfuse(copied))
    assert list(fused_modules(model)) == [path]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_an_edited_block(reentrant, calls):
    class Checkpointed(Caller):
        def forward(self, x):
            return checkpoint(self.blocks[0], x, use_reentrant=reentrant)[0]

    model, plain = twins(Checkpointed(PreNorm()))
    assert_same_step(model, plain, ROWS)
    assert calls == ["add before"] * 2


@pytest.mark.parametrize("name", BLOCKS)
def test_an_edited_block_compiles_and_exports_to_one_graph(name, calls):
    block, x, made, _ = BLOCKS[name]
    model, plain = twins(copy.deepcopy(block))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same_step(compiled, plain, x)
    assert calls == made
    exported = torch.export.export(model.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), plain.eval()(x))
    torch.compiler.reset()


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
    left = [row.path for row in fusions(model) if not row.label]
    first = ["encoder.layers.0.norm1", "encoder.layers.1.norm1", "decoder.norm1"]
    assert left == (first if norm_first else [])
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


# How many norms are fused, and of how many, in models of two layers.
TRANSFORMERS = {"bert": (5, 5), "gpt2": (2, 5), "vit": (2, 5), "whisper": (6, 12)}


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.filterwarnings("ignore")
def test_transformers_blocks_are_fused_and_give_the_same_bits(name):
    listed = pytest.importorskip("zoo.transformers_models", exc_type=ImportError).architectures()
    architecture = next(a for a in listed if a.name == name)
    torch.manual_seed(0)
    plain = swap(architecture.build())
    model = fuse(copy.deepcopy(plain))
    rows = list(fusions(model))
    assert (sum(row.label is not None for row in rows), len(rows)) == TRANSFORMERS[name]
    inputs = architecture.inputs(model)
    ours, theirs = observe(model, inputs), observe(plain, inputs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
