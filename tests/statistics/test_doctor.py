"""`doctor`: planted faults are found and named with their fix; healthy models have none."""

import copy
import re
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import normplug
from normplug import doctor, freeze, fuse, param_groups, recalibrate, swap
from normplug._tools.doctor import _FIXES
from statistics_cases import Checkpointed, healthy, images, net, trained


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3)
        self.last = self.norm

    def forward(self, x):
        return self.last(self.conv(self.norm(x)))


class Block(nn.Module):
    def __init__(self, factor=1):
        super().__init__()
        self.norm, self.linear, self.factor = nn.LayerNorm(9), nn.Linear(9, 9), factor

    def forward(self, x):
        return self.factor * x + self.linear(self.norm(x))


class Permuted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def data():
    return [images(16, seed) for seed in range(3)]


def poisoned(model):
    model[4].running_var[2] = float("inf")


def at_start(model):
    model[4].reset_running_stats()


def of_other_data(model):
    return [3 * x + 4 for x in data()]


def dead(model):
    model[0].weight.data[1] = 0.0


def tiny(model):
    model[0].weight.data *= 1e-4


def half_frozen(model):
    model[1].requires_grad_(False)


def in_half_precision(model):
    model.bfloat16()
    return [x.bfloat16() for x in data()]


def slow(model):
    model[1].momentum = 0.01
    trained(model, steps=10)


def last_batch(model):
    model[1].momentum = 1.0
    trained(model)


def in_evaluation(model):
    model[1].eval()


def missing(model):
    model[1].running_mean = model[1].running_var = None


def dropout_before(model):
    model.insert(4, nn.Dropout(0.8))
    trained(model)


def small(model):
    model.eval()
    return images(2)[:, :, :5, :5]


def far_mean(model):
    return [(x + 1000).bfloat16() for x in data()]


def growing(model):
    """The last block sees 400 times the variance of the first; by depth, 183 times."""
    x = model[:2](images(16))
    branch = model[2].linear(model[2].norm(x))
    ratio = 5 * branch.var(-1).mean() / x.var(-1).mean()
    for parameter in model[1].parameters():
        parameter.data *= (ratio / 400).sqrt()


def blocks(factor=1):
    return nn.Sequential(
        nn.Flatten(2), nn.Linear(81, 9), *(Block(factor) for _ in range(6))
    )


def norms_of_rows():
    first = nn.LayerNorm(81, elementwise_affine=False)
    return nn.Sequential(nn.Flatten(2), first, nn.LayerNorm(81))


def flat(*layers, **options):
    return nn.Sequential(nn.Flatten(), nn.Linear(243, 8, **options), *layers)


def with_dropout_moved(model, batches):
    model[4], model[5] = model[5], model[4]


def with_new_weights(model, batches):
    nn.init.normal_(model[0].weight)


def without_biases(model, batches):
    for layer in model:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.bias = None


def with_a_layer_for_each_call(model, batches):
    model.last = nn.BatchNorm2d(3)


def with_smaller_factors(model, batches):
    for block in model[2:]:
        block.factor = 0.5


def with_a_layer(place, make):
    return lambda model, batches: model.__setitem__(place, make(model[place]))


class Fault(NamedTuple):
    """A fault of a model, and what doctor must say of it."""

    make: Any  # the model before the fault
    plant: Any  # adds the fault; returns the batches, if they are part of it
    layer: str
    finding: str
    fix: str  # a part of it
    # Does what the fix says in a sentence; returns the batches, if they change. None runs the fix.
    repair: Any = None


RECALIBRATE, SAFE = "normplug.recalibrate(model, loader)", 'statistics="safe"'
AT_START = "running statistics at their initial values"
STALE = "running statistics stale, or of other data"
IDENTITY = "a norm without effect"
BIAS = "a bias before a BatchNorm, which has no effect"
CALLS = "a BatchNorm that is called on different inputs"
GROWS = "residual variance that grows with depth"
FAULTS = [
    Fault(trained, poisoned, "4", "poisoned running statistics", SAFE),
    Fault(trained, at_start, "4", AT_START, RECALIBRATE),
    Fault(trained, of_other_data, "1", STALE, RECALIBRATE),
    Fault(lambda: freeze(trained()), of_other_data, "1", STALE, "normplug.thaw("),
    Fault(lambda: freeze(healthy()), None, "1", AT_START, "normplug.thaw("),
    Fault(healthy, dropout_before, "5", "a gap between training and evaluation",
          "dropout after the norm", with_dropout_moved),
    Fault(healthy, small, "4", "too few values per channel", "sync=True", lambda *_: data()),
    Fault(healthy, dead, "1", "dead channels", "remove these channels", with_new_weights),
    Fault(healthy, tiny, "1", "eps dominates the variance", '.get_submodule("1").eps ='),
    Fault(net, None, "0", BIAS, "Conv2d(..., bias=False)", without_biases),
    Fault(lambda: flat(nn.BatchNorm1d(8)), None, "1", BIAS, "Linear(..., bias=False)",
          without_biases),
    Fault(healthy, half_frozen, "1", "a frozen weight, and statistics that move",
          'freeze(model, include="1")'),
    Fault(lambda: Checkpointed(healthy()), None, "inner.1",
          "a BatchNorm under activation checkpointing", SAFE),
    Fault(Twice, None, "norm", CALLS, "a layer for each call", with_a_layer_for_each_call),
    Fault(healthy, in_half_precision, "1", "statistics in half precision",
          '.get_submodule("1").float()'),
    Fault(healthy, slow, "1", "a momentum too small for the steps trained", "momentum = 0.3"),
    Fault(healthy, last_batch, "1", "a momentum that keeps only the last batch",
          "momentum = 0.1"),
    Fault(trained, in_evaluation, "1", "a norm in evaluation, whose weight trains",
          ".train()"),
    Fault(trained, missing, "1", "running statistics that are missing",
          "track_running_stats = False"),
    Fault(lambda: blocks(3), None, "7.norm", GROWS, "smaller weights", with_smaller_factors),
    Fault(blocks, growing, "7.norm", GROWS, 'by_depth("1/l")'),
    Fault(lambda: nn.Sequential(nn.BatchNorm2d(3)), far_mean, "0",
          "cancellation: a mean far above the deviation", "subtract the mean",
          lambda _, batches: [(x - 1000) for x in batches]),
    Fault(norms_of_rows, None, "1", IDENTITY, "nn.Identity()", with_a_layer(1, nn.Identity)),
    Fault(lambda: nn.Sequential(nn.Conv2d(3, 9, 1), nn.LayerNorm(9)), None, "1",
          "LayerNorm over the wrong axis", "x.permute(0, 2, 3, 1)", with_a_layer(1, Permuted)),
    Fault(lambda: flat(nn.GroupNorm(8, 8), bias=False), None, "2",
          "one value per group: the output is the bias", "nn.GroupNorm(1, 8)",
          with_a_layer(2, lambda _: nn.GroupNorm(1, 8))),
]  # fmt: skip


@pytest.mark.parametrize("change", [lambda m: m, swap], ids=["stock", "swapped"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.finding)
def test_a_fault_is_found_and_named_with_a_fix_that_ends_it(fault, change):
    torch.manual_seed(0)
    model = fault.make()
    planted = None if fault.plant is None else fault.plant(model)
    batches = data() if planted is None else planted
    model = change(model)
    found = doctor(model, batches)
    rows = [row for row in found.findings if row.finding == fault.finding]
    assert [row.layer for row in rows[:1]] == [fault.layer], str(found)
    assert fault.fix in rows[0].fix
    assert re.search(r"\d|requires_grad", rows[0].evidence)
    assert fault.finding in str(found)
    assert fault.finding in found._repr_html_()
    assert found.to_pandas().finding.tolist() == [row.finding for row in found]
    if fault.repair is None:
        for row in rows:
            exec(row.fix, {"model": model, "loader": batches, "normplug": normplug})
    else:
        batches = fault.repair(model, batches) or batches
    left = doctor(model, batches)
    assert fault.finding not in [row.finding for row in left], str(left)


def test_every_finding_is_planted():
    elsewhere = {"norm parameters that decay", "statistics that differ between ranks"}
    assert {fault.finding for fault in FAULTS} | elsewhere == set(_FIXES)


def affine(norm):
    for parameter in norm.parameters():
        # Weights near 0 would let eps explain more than rounding.
        parameter.data = torch.linspace(0.5, 2, len(parameter))
    return norm


class Hidden(nn.Module):
    """A BatchNorm before a LayerNorm, in a branch that has no effect yet."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(8), nn.LayerNorm(8)
        nn.init.zeros_(self.second.weight)

    def forward(self, x):
        return x + self.second(self.first(x))


# Name -> whether a norm is without effect, and the layers.
PAIRS = {
    "BatchNorm, LayerNorm": (False, (nn.BatchNorm1d(8), nn.LayerNorm(8))),
    "BatchNorm, GroupNorm": (False, (nn.BatchNorm1d(8), nn.GroupNorm(2, 8))),
    "LayerNorm, LayerNorm": (False, (nn.LayerNorm(8), nn.LayerNorm(8))),
    "trained LayerNorm, LayerNorm": (False, (affine(nn.LayerNorm(8)), nn.LayerNorm(8))),
    "LayerNorm, RMSNorm": (False, (nn.LayerNorm(8, bias=False), nn.RMSNorm(8))),
    "a branch of weight 0": (False, (Hidden(),)),
    "plain LayerNorm, LayerNorm": (
        True,
        (nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(8)),
    ),
    "BatchNorm, BatchNorm": (True, (affine(nn.BatchNorm1d(8)), nn.BatchNorm1d(8))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_norm_is_without_effect_only_if_nothing_changes_without_it(name):
    torch.manual_seed(0)
    holds, layers = PAIRS[name]
    linear = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(linear, *copy.deepcopy(layers), nn.Linear(8, 2))
    x = torch.randn(64, 8) * torch.tensor([1, 1, 9, 1, 1, 1, 4, 1.0]) + 2
    found = [row.layer for row in doctor(model, x).findings if row.finding == IDENTITY]
    assert found == (["1"] if holds else [])
    model.lock = threading.Lock()  # cannot be copied: nothing is claimed
    assert IDENTITY not in [row.finding for row in doctor(model, x).findings]


def test_a_bias_has_an_effect_before_a_batch_norm_that_does_not_use_its_batch():
    for change in (
        freeze,
        lambda m: [n.eval().requires_grad_(False) for n in (m[1], m[4])],
    ):
        model = trained(net())
        assert BIAS in [row.finding for row in doctor(model, data())]
        change(model)
        found = doctor(model, data())
        assert not found.findings, str(found)


class Scaled(nn.BatchNorm1d):
    """Divides by the deviation, and subtracts no mean."""

    def forward(self, x):
        return x / x.std(0)


class Silent(nn.Module):
    """A bias and a norm in a branch that has no effect on the output."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), Scaled(8)

    def forward(self, x):
        return x + 0 * self.norm(self.linear(x))


def test_a_bias_that_only_moves_a_branch_without_effect_has_an_effect():
    assert BIAS not in [row.finding for row in doctor(Silent(), torch.randn(64, 8))]


class Read(nn.Module):
    """The input of a norm, which a branch reads, too, whose effect is still small."""

    def __init__(self, first):
        super().__init__()
        self.first, self.norm = first, nn.BatchNorm1d(8)

    def forward(self, x):
        y = self.first(x)
        return self.norm(y) + 1e-6 * y


@pytest.mark.parametrize("first", [nn.Linear(8, 8), nn.BatchNorm1d(8)])
def test_an_output_that_another_operation_reads_has_an_effect(first):
    model = Read(affine(first) if isinstance(first, nn.BatchNorm1d) else first)
    assert not doctor(model, torch.randn(64, 8)).findings


def test_a_checkpoint_without_a_count_of_batches_is_not_at_its_start():
    for counter in (torch.tensor(0), None):
        model = trained()
        nn.init.normal_(model[0].weight, std=9)  # statistics far from their start
        recalibrate(model, data())
        for norm in (model[1], model[4]):
            norm.num_batches_tracked = counter
            norm.momentum = 0.01
        assert not doctor(model, data()).findings
        model = trained(model, steps=5)
        assert not doctor(model, data()).findings
        found = doctor(model, [99 * x for x in data()])
        assert STALE in [row.finding for row in found]


def test_statistics_between_their_start_and_the_data_are_no_slow_momentum():
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=0.01))
    model[0].running_var.fill_(100.0)  # 5 steps from 1 to 15,000 would make it 700
    model[0].num_batches_tracked.fill_(5)
    (row,) = doctor(model, 122 * torch.randn(256, 4)).findings
    assert row.finding == STALE


def test_statistics_of_a_few_samples_are_not_stale_by_chance():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(1))
    whole = 9 + 5 * torch.randn(4096, 1, 1, 1) + 0.1 * torch.randn(4096, 1, 4, 4)
    recalibrate(model, whole)
    few = [x for x in whole.split(4) if 1.1 < ((x.mean() - 9) / x.std()).abs() < 2]
    assert len(few) > 20
    for x in few[:20]:  # 1.1 to 2 deviations away, of which sampling explains 2
        assert not doctor(model, x).findings


def test_calls_on_like_inputs_share_a_layer_without_a_finding():
    model = Twice()
    model.conv = nn.Identity()
    assert not doctor(model, [(x - 1) / 2 for x in data()]).findings


def test_different_calls_of_a_layer_are_no_gap_between_training_and_evaluation():
    torch.manual_seed(0)
    (row,) = doctor(Twice(), data()).findings
    assert row.finding == CALLS


def test_layers_that_stay_in_evaluation_on_purpose_have_no_finding():
    model = trained()
    model[1].eval().requires_grad_(False)
    assert not doctor(model, data()).findings
    # Weights that hold the statistics, as converters write them.
    folded = freeze(healthy())
    for norm in (folded[1], folded[4]):
        nn.init.uniform_(norm.weight, 0.4, 0.6)
    assert AT_START not in [row.finding for row in doctor(folded, data())]


@pytest.mark.parametrize("copies", [True, False])
def test_an_optimizer_that_steps_in_the_backward_does_not_step(copies):
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model[3].register_full_backward_hook(lambda *_: optimizer.step())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if not copies:
        model.lock = threading.Lock()
    before = [p.clone() for p in model.parameters()]
    doctor(model, data())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    assert all((p.grad == 1).all() for p in model.parameters())
    sum(p.sum() for p in model.parameters()).backward()  # the hooks are there again
    assert optimizer.state


def test_a_model_without_norms_is_not_called_healthy():
    with pytest.warns(UserWarning, match="nothing to examine: Linear has no norm layer"):
        assert not doctor(nn.Linear(2, 2), torch.randn(4, 2)).findings


def test_a_decaying_norm_is_found_by_the_optimizer():
    model = healthy()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    rows = doctor(model, data(), optimizer=optimizer).findings
    assert [row.layer for row in rows] == ["1", "4"]
    assert {row.finding for row in rows} == {"norm parameters that decay"}
    assert rows[0].fix == "optimizer = AdamW(normplug.param_groups(model, 0.1), ...)"
    good = torch.optim.AdamW(param_groups(model, 0.1))
    assert not doctor(model, data(), optimizer=good).findings
    rule = r"normplug\.doctor: optimizer must be a torch.optim.Optimizer, or None; got generator"
    with pytest.raises(TypeError, match=rule):
        doctor(model, data(), optimizer=model.parameters())


def test_ranks_that_differ_are_found(two_ranks):
    for result in two_ranks:
        before, after = result["examined"]
        assert [row[:2] for row in before] == [
            ("1", "statistics that differ between ranks")
        ]
        assert "normplug.sync_buffers(model)" in before[0][3]
        assert after == []


def of_torchvision(name, *sizes):
    return lambda: getattr(pytest.importorskip("torchvision").models, name)(*sizes)


def of_timm(name, **options):
    return lambda: pytest.importorskip("timm").create_model(name, **options)


def of_transformers(name):
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}

    def make():
        tf = pytest.importorskip("transformers")
        config = getattr(tf, f"{name}Config")
        words = config(**sizes, intermediate_size=64, vocab_size=99)
        return getattr(tf, f"{name}Model")(words)

    return make


LIBRARIES = {
    "resnet18": of_torchvision("resnet18"),
    "shufflenet_v2_x0_5": of_torchvision("shufflenet_v2_x0_5"),
    "mobilenetv3_small_050": of_timm("mobilenetv3_small_050"),
    "densenet": of_torchvision("DenseNet", 8, (2, 2, 2, 2), 16),
    "convnext_atto": of_timm("convnext_atto"),
    "vit_tiny": of_timm("vit_tiny_patch16_224", img_size=64),
    "Bert": of_transformers("Bert"),
    "Llama": of_transformers("Llama"),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_models_of_libraries_have_no_findings_at_their_start_and_after_training(name):
    torch.manual_seed(0)
    model = LIBRARIES[name]()
    reads_words = name in ("Bert", "Llama")

    def batch():
        if reads_words:
            return {"input_ids": torch.randint(99, (4, 16))}
        return torch.randn(16, 3, 64, 64)

    for each in (model, swap(copy.deepcopy(model))):
        found = doctor(each, batch())
        assert not found.findings, str(found)
    optimizer = torch.optim.AdamW(param_groups(model, 0.05), lr=1e-3)
    for _ in range(20):
        if reads_words:
            loss = model(**batch()).last_hidden_state.square().mean()
        else:
            loss = nn.functional.cross_entropy(model(batch()), torch.randint(10, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = doctor(model, batch(), optimizer=optimizer)
    assert not found.findings, str(found)


def test_healthy_models_have_no_findings():
    report = doctor(trained(), data()).to_pandas()
    assert list(report) == ["layer", "finding", "evidence", "fix"]
    for model in (trained(), freeze(trained()), fuse(swap(trained())), trained().eval()):
        assert str(doctor(model, data())) == "no findings"
    model = healthy()
    recalibrate(model, data())
    assert not doctor(model, data()).findings


@pytest.mark.parametrize(
    "change",
    [lambda m: m, lambda m: fuse(swap(m)), lambda m: swap(m, backend="triton"), freeze],
    ids=["stock", "fused", "a backend without a CPU path", "frozen"],
)
def test_it_changes_nothing(change):
    model = change(nn.Sequential(trained(), nn.Dropout()))
    model[0][0].weight.grad = torch.ones_like(model[0][0].weight)
    model[0][3].eval()

    def state():
        tensors = [*model.parameters(), *model.buffers(), model[0][0].weight.grad]
        modules = [
            (
                *(type(m), m.training, getattr(m, "backend", None), sorted(vars(m))),
                *(len(m._forward_hooks), len(m._forward_pre_hooks)),
            )
            for m in model.modules()
        ]
        return [t.clone() for t in tensors], modules, torch.get_rng_state()

    batches = data()
    before, seen = state(), []
    doctor(model, batches, loss=lambda y, x: seen.append(x.shape) or y.sum())
    after = state()
    assert seen == [(16, 3, 9, 9)]
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    assert all(p.grad is None for p in model[0][3].parameters())
