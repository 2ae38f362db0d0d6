"""`doctor`: planted faults are found and named with their fix; healthy models have none."""

import copy

import pytest
import torch
from torch import nn

import statistics_cases
import sync_cases
from normplug import doctor, freeze, fuse, param_groups, recalibrate, swap
from statistics_cases import Checkpointed, healthy, images, net, trained


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(self.norm(x)))


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(9), nn.Linear(9, 9)

    def forward(self, x):
        return 3 * x + self.linear(self.norm(x))


def data():
    return [images(16, seed) for seed in range(3)]


def poisoned():
    model = trained()
    model[4].running_var[2] = float("inf")
    return model


def at_start():
    model = trained()
    model[4].reset_running_stats()
    return model


def another_data_set():
    model = trained()
    return model, [3 * x + 4 for x in data()]


def dropout_before():
    model = healthy()
    model.insert(4, nn.Dropout(0.8))
    return trained(model)


def linear_bias():
    return nn.Sequential(nn.Flatten(), nn.Linear(243, 8), nn.BatchNorm1d(8))


def dead():
    model = healthy()
    model[0].weight.data[1] = 0.0
    return model


def tiny():
    model = healthy()
    model[0].weight.data *= 1e-4
    return model


def half_frozen():
    model = healthy()
    model[1].requires_grad_(False)
    return model


def half_statistics():
    return healthy().bfloat16(), [x.bfloat16() for x in data()]


def slow():
    model = healthy()
    model[1].momentum = 0.01
    return trained(model, steps=10)


def growing():
    return nn.Sequential(nn.Flatten(2), nn.Linear(81, 9), *(Grows() for _ in range(6)))


def checkpointed():
    return Checkpointed(healthy())


def small():
    return healthy().eval(), images(2)[:, :, :5, :5]


def far_mean():
    model = nn.Sequential(nn.BatchNorm2d(3))
    return model, [(x + 1000).bfloat16() for x in data()]


def followed():
    return nn.Sequential(nn.Flatten(2), nn.LayerNorm(81), nn.LayerNorm(81))


def wrong_axis():
    return nn.Sequential(nn.Conv2d(3, 9, 1), nn.LayerNorm(9))


def one_value():
    return nn.Sequential(nn.Flatten(), nn.Linear(243, 8, bias=False), nn.GroupNorm(8, 8))


RECALIBRATE, SAFE = "normplug.recalibrate(model, loader)", 'statistics="safe"'
# A model, or a model and its data; the layer; the finding; a part of the fix.
PLANTED = [
    (poisoned, "4", "poisoned running statistics", SAFE),
    (at_start, "4", "running statistics at their start", RECALIBRATE),
    (another_data_set, "1", "running statistics stale, or of other data", RECALIBRATE),
    (dropout_before, "5", "a gap between training and evaluation", "dropout after the norm"),
    (small, "4", "too few values a channel", "sync=True"),
    (dead, "1", "dead channels", "remove these channels"),
    (tiny, "1", "eps dominates the variance", '.get_submodule("1").eps ='),
    (net, "0", "a bias before a BatchNorm, which has no effect", "Conv2d(..., bias=False)"),
    (linear_bias, "1", "a bias before a BatchNorm, which has no effect", "Linear(..., bias=False)"),
    (half_frozen, "1", "a frozen weight, and statistics that move", 'freeze(model, include="1")'),
    (checkpointed, "inner.1", "a BatchNorm under activation checkpointing", SAFE),
    (Twice, "norm", "a BatchNorm that is called several times", RECALIBRATE),
    (half_statistics, "1", "statistics in half precision", '.get_submodule("1").float()'),
    (slow, "1", "a momentum too slow for the steps trained", "momentum = 0.3"),
    (growing, "7.norm", "residual variance that grows with depth", 'by_depth("1/l")'),
    (far_mean, "0", "cancellation: a mean far above the deviation", "subtract the mean"),
    (followed, "1", "a norm without effect", "nn.Identity()"),
    (wrong_axis, "1", "LayerNorm over the wrong axis", "x.permute(0, 2, 3, 1)"),
    (one_value, "2", "one value a group: the output is the bias", "nn.GroupNorm(1, 8)"),
]  # fmt: skip


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize(
    ("make", "layer", "finding", "fix"), PLANTED, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_planted_fault_is_found_and_named_with_its_fix(make, layer, finding, fix, swaps):
    torch.manual_seed(0)
    made = make()
    model, batches = made if isinstance(made, tuple) else (made, data())
    found = doctor(swap(model) if swaps else model, batches)
    rows = [row for row in found.findings if row.finding == finding]
    assert [row.layer for row in rows[:1]] == [layer], str(found)
    assert fix in rows[0].fix
    assert any(c.isdigit() for c in rows[0].evidence) or "requires_grad" in rows[0].evidence
    assert finding in str(found)
    assert finding in found._repr_html_()
    assert found.to_pandas().finding.tolist() == [row.finding for row in found]


def test_a_decaying_norm_is_found_by_the_optimizer():
    model = healthy()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    rows = doctor(model, data(), optimizer=optimizer).findings
    assert [row.layer for row in rows] == ["1", "4"]
    assert {row.finding for row in rows} == {"norm parameters that decay"}
    assert "normplug.param_groups(model, 0.1)" in rows[0].fix
    good = torch.optim.AdamW(param_groups(model, 0.1))
    assert not doctor(model, data(), optimizer=good).findings


def test_ranks_that_differ_are_found(tmp_path):
    results = sync_cases.ran(sync_cases.process, 2, tmp_path, [statistics_cases.examined])
    for result in results:
        before, after = result["examined"]
        assert [row[:2] for row in before] == [("1", "statistics that differ between ranks")]
        assert "normplug.sync_buffers(model)" in before[0][3]
        assert after == []


def libraries():
    models = pytest.importorskip("torchvision").models
    timm = pytest.importorskip("timm")
    tf = pytest.importorskip("transformers")
    x = torch.randn(16, 3, 64, 64)
    yield models.resnet18(), x
    yield models.shufflenet_v2_x0_5(), x
    yield timm.create_model("mobilenetv3_small_050"), x
    yield models.DenseNet(8, (2, 2, 2, 2), 16), x
    yield timm.create_model("convnext_atto"), x
    yield timm.create_model("vit_tiny_patch16_224", img_size=64), x
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
    words = {"input_ids": torch.randint(99, (4, 16))}
    yield tf.BertModel(tf.BertConfig(**sizes, intermediate_size=64, vocab_size=99)), words
    yield tf.LlamaModel(tf.LlamaConfig(**sizes, intermediate_size=64, vocab_size=99)), words


def test_healthy_models_have_no_findings():
    torch.manual_seed(0)
    for model, batch in libraries():
        for each in (model, swap(copy.deepcopy(model))):
            assert not doctor(each, batch).findings, str(doctor(each, batch))
    assert [*doctor(trained(), data()).to_pandas()] == ["layer", "finding", "evidence", "fix"]
    for model in (trained(), freeze(trained()), fuse(swap(trained())), trained().eval()):
        assert str(doctor(model, data())) == "no findings"
    model = healthy()
    recalibrate(model, data())
    assert not doctor(model, data()).findings


def test_healthy_models_have_no_findings_after_training_on_random_data():
    torch.manual_seed(0)
    for model, batch in libraries():
        optimizer = torch.optim.AdamW(param_groups(model, 0.05), lr=1e-3)
        for _ in range(20):
            if isinstance(batch, dict):
                batch = {"input_ids": torch.randint(99, (4, 16))}
                loss = model(**batch).last_hidden_state.square().mean()
            else:
                batch = torch.randn(16, 3, 64, 64)
                loss = nn.functional.cross_entropy(model(batch), torch.randint(10, (16,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = doctor(model, batch, optimizer=optimizer)
        assert not found.findings, f"{type(model).__name__}: {found}"


@pytest.mark.parametrize(
    "change",
    [lambda m: m, lambda m: fuse(swap(m)), lambda m: swap(m, backend="triton"), freeze],
    ids=["stock", "fused", "a backend that the CPU has not", "frozen"],
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


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="doctor: the loader gave no batch"):
        doctor(net(), [])
    with pytest.raises(TypeError, match="doctor: loader must be an iterable of batches"):
        doctor(net(), 3)
