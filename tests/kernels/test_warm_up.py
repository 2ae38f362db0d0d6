"""`normplug.warm_up` compiles exactly the kernels of a training step, and changes nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.fx.immutable_collections import immutable_dict
from torch.testing._internal.two_tensor import TwoTensor

triton = pytest.importorskip("triton")
import normplug  # noqa: E402
from launches import Driver  # noqa: E402
from normplug._kernels import ahead, launch  # noqa: E402
from normplug._ops import can_run  # noqa: E402
from normplug._ops.warm_up import _record, _refusal_of_model  # noqa: E402
from programs import program  # noqa: E402

pytestmark = [
    pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(not ahead.KEYED, reason="workers need Triton 3.5 on Linux"),
]


@pytest.fixture
def kernels_on_cpu(monkeypatch):
    """Kernels are chosen for CPU tensors, and their launches do nothing. Returns the launched."""
    launched = {}

    def run(self, stream, *tensors):
        launched.setdefault(self.job([t.dtype for t in tensors]).key)

    monkeypatch.setattr(launch.Launch, "__call__", run)
    monkeypatch.setattr(can_run, "refusal_of_device", lambda *tensors: None)
    monkeypatch.setattr(ahead, "expect", lambda job, certain: False)
    return launched


class Model(nn.Module):
    """Norms of all kinds, a dropout, an activation, and a residual sum."""

    def __init__(self, reads_a_value=False):
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3)
        self.batch_norm, self.group_norm = nn.BatchNorm2d(16), nn.GroupNorm(4, 16)
        self.relu, self.dropout = nn.ReLU(), nn.Dropout(0.5)
        self.layer_norm, self.rms_norm = nn.LayerNorm(16), nn.RMSNorm(16)
        self.linear, self.head = nn.Linear(16, 16), nn.Linear(16, 5)
        self.reads_a_value = reads_a_value

    def forward(self, x):
        x = self.relu(self.batch_norm(self.convolution(x)))
        x = self.group_norm(x).flatten(2).transpose(1, 2)
        if self.reads_a_value and x.sum() > 0:
            return x
        x = x + self.dropout(self.linear(self.layer_norm(x)))
        return self.head(self.rms_norm(x).mean(1))


def swapped(fuse=False, **options):
    model = normplug.swap(Model(**options), backend="triton")
    return normplug.fuse(model) if fuse else model


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("fuse", [False, True], ids=["swap", "fuse"])
def test_it_finds_the_kernels_of_a_step_and_no_others(kernels_on_cpu, fuse, training):
    model, x = swapped(fuse).train(training), torch.randn(4, 3, 12, 12)
    with torch.set_grad_enabled(training):
        jobs, why = _record(model, (x,), {})
        assert (why, kernels_on_cpu) == ("", {})
        y = model(x)
    if training:
        y.sum().backward()
    assert set(jobs) == set(kernels_on_cpu)
    assert len(jobs) == (8 if training else 4)


def test_nothing_of_the_model_changes(kernels_on_cpu):
    model, x = swapped(True), torch.randn(4, 3, 12, 12, requires_grad=True)
    calls = []
    model.head.register_forward_hook(lambda *arguments: calls.append(1))
    model.linear.eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    tensors = {
        n: (id(t), t._version) for n, t in model.state_dict(keep_vars=True).items()
    }
    modules = {
        n: (type(m), m.training, dict(m._forward_hooks)) for n, m in model.named_modules()
    }
    jobs, _ = _record(model, (x,), {})
    assert jobs
    after = model.state_dict(keep_vars=True)
    assert {n: (id(t), t._version) for n, t in after.items()} == tensors
    assert all(torch.equal(before[n], t) for n, t in after.items())
    assert [t.grad for t in (x, *model.parameters())] == [None] * (
        1 + len(list(model.parameters()))
    )
    assert torch.equal(torch.get_rng_state(), state)
    now = {
        n: (type(m), m.training, dict(m._forward_hooks)) for n, m in model.named_modules()
    }
    assert now == modules


def test_it_compiles_what_is_not_in_the_cache(kernels_on_cpu, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NORMPLUG_COMPILE_WORKERS", "1")
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    ahead.most_workers.cache_clear()
    try:
        for compiled in (2, 0):
            fresh = ahead.Ahead()
            for name in ("start", "expect", "wait"):
                monkeypatch.setattr(ahead, name, getattr(fresh, name))
            model = normplug.swap(nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 2)))
            model[0].backend = "triton"
            found = normplug.warm_up(model, torch.randn(64, 16))
            fresh.stop()
            assert (found.kernels, found.why) == (compiled, "")
            assert str(found).startswith(f"normplug: compiled {compiled} kernels in ")
    finally:
        ahead.most_workers.cache_clear()


STEP = """
import torch
import normplug
from test_warm_up import swapped

model, x = swapped(True).cuda(), torch.randn(4, 3, 12, 12, device="cuda")
found = normplug.warm_up(model, x)
model(x).sum().backward()
torch.cuda.synchronize()
print((found.kernels, found.why), normplug.native.status().kernels)
"""


@pytest.mark.gpu
def test_on_a_gpu_the_step_itself_compiles_nothing(tmp_path):
    own = {"TRITON_CACHE_DIR": str(tmp_path), "NORMPLUG_COMPILE_WORKERS": "4"}
    done = program(STEP, environment=own)
    assert done.stdout == "(8, '') {'here': 0, 'workers': 8, 'cache': 0}\n", done.stderr


def test_a_model_that_reads_values_says_why_its_kernels_are_not_all_known(kernels_on_cpu):
    jobs, why = _record(swapped(reads_a_value=True), (torch.randn(4, 3, 12, 12),), {})
    assert len(jobs) == 2  # of the forwards before the value is read
    assert why.startswith("The model cannot run on fake tensors: DataDependent")


class Caching(nn.Module):
    """Stores tensors where its forward finds them again, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.norm, self.by_size, self.config = (
            nn.LayerNorm(16),
            {},
            immutable_dict(width=16),
        )
        self.register_buffer("mask", None)

    def forward(self, x):
        if self.mask is None:
            self.mask, self.angles = torch.ones(16), torch.arange(16.0)
            self.by_size[x.shape] = torch.ones(16)
        return self.norm(x) * self.mask * self.angles * self.by_size[x.shape]


def test_a_model_stores_no_fake_tensor(kernels_on_cpu):
    model, x = normplug.swap(Caching(), backend="triton"), torch.randn(4, 16)
    jobs, why = _record(model, (x,), {})
    assert (len(jobs), why) == (2, "")
    assert (model.mask, model.by_size, hasattr(model, "angles")) == (None, {}, False)
    assert type(model(x).detach()) is torch.Tensor


def test_a_compiled_model_runs_uncompiled(kernels_on_cpu):
    model, x = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 2)), torch.randn(4, 16)
    compiled = torch.compile(normplug.swap(model, backend="triton"), backend="eager")
    jobs, why = _record(compiled, (x,), {})
    assert (len(jobs), why) == (2, "")


def test_what_waits_for_other_processes_is_left_alone(kernels_on_cpu, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    model = nn.Sequential(normplug.SyncBatchNorm(16))
    assert _refusal_of_model(model) == "a SyncBatchNorm waits for other processes"
    model = swapped()
    model.head.weight = nn.Parameter(TwoTensor(torch.ones(5, 16), torch.ones(5, 16)))
    why = "a parameter is a TwoTensor: call warm_up before the model is wrapped"
    assert _refusal_of_model(model) == why


def test_without_a_gpu_it_does_nothing_and_says_so():
    found = normplug.warm_up(swapped(), torch.randn(4, 3, 12, 12))
    assert found.kernels == 0
    assert found.why == "The input is on cpu, and the kernels need a CUDA device"


def test_it_takes_modules_only():
    with pytest.raises(TypeError, match="normplug.warm_up: "):
        normplug.warm_up(torch.randn)
