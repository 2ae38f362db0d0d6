"""Compatibility with other tools: each tool on swapped models, an unswapped one, a stock one.

    python benchmarks/matrix.py

writes docs/results/compatibility.json and, from its rows, the page docs/compatibility.md.
`--device cuda --output PAGE --json FILE` runs the tools that work on a GPU. `test_matrix.py` runs
the same cells.

A cell applies one tool to a small model. The result must equal that of the equivalent stock model;
in mode golden its norm weights are multiplied by sqrt(tv).
"""

import argparse
import copy
import importlib.util
import io
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import normplug
from normplug._files import stamp, write_file
from normplug.bench.rows import add_to_file

BATCH_NORM = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm
NORMS = (BATCH_NORM, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, INSTANCE_NORM)
COLUMNS = ("standard", "golden", "unswapped")
NAN = "refused: the outputs are nan"
# The fields of a row that are no versions.
NOT_VERSIONS = ("tool", "lacks", *COLUMNS, "device", "date", "commit")


@dataclass(frozen=True)
class Row:
    """One tool.

    refused: a pattern of the cell of a golden model; "" where the tool works on it.
    always: whether the tool is refused in mode standard too.
    without: layers to leave out, since the tool does not support them even stock, or is slow.
    cpu: whether the tool works on the CPU only.
    """

    tool: str
    run: Callable[[nn.Module], Any]
    needs: tuple[str, ...]
    refused: str
    tolerance: float
    always: bool = False
    without: tuple[str, ...] = ()
    cpu: bool = False

    @property
    def lacks(self) -> str:
        """The missing ones of `needs`, and the device if the tool does not support it."""
        missing = [name for name in self.needs if not is_there(name)]
        if self.cpu and DEVICE.type != "cpu":
            missing.append(f"support for {DEVICE.type}")
        return ", ".join(missing)


ROWS: list[Row] = []


def is_there(name):
    if name == "c++":
        return shutil.which("c++") is not None
    if name.startswith("torch>="):
        return torch.__version__ >= name.removeprefix("torch>=")
    try:
        spec = importlib.util.find_spec(name)
        # A test folder of that name has none.
        return spec is not None and spec.origin is not None
    except ModuleNotFoundError:
        return False


def row(tool, *needs, refused="", always=False, tolerance=1e-4, without=(), cpu=False):
    def add(run):
        ROWS.append(Row(tool, run, needs, refused, tolerance, always, without, cpu))
        return run

    return add


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.group = nn.GroupNorm(2, 8)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(32, 32)
        self.bn1 = nn.BatchNorm1d(32)
        self.norm = nn.LayerNorm(32)
        self.rms = nn.RMSNorm(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.relu(self.group(self.relu(self.bn(self.conv(x)))))
        x = self.fc(self.flatten(self.pool(self.instance(x))))
        return self.head(self.rms(self.norm(self.bn1(x))))


def randomised(model):
    """The model with random weights, biases and running statistics in its norms."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, NORMS):
            for name, parameter in module.named_parameters(recurse=False):
                nn.init.normal_(parameter, float(name == "weight"), 0.3)
        if isinstance(module, BATCH_NORM):
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model


def make(without=()):
    torch.manual_seed(0)
    net = randomised(Net())
    for name in without:
        setattr(net, name, nn.Identity())
    return net.to(DEVICE)


def folded(model, tv):
    """The stock model that a swapped one must equal: norm weights times sqrt(tv)."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, NORMS):
                module.weight.mul_(tv**0.5)
    return model


def mode_of(name):
    """The mode of a column's model. The unswapped one was golden."""
    return "standard" if name == "standard" else "golden"


def column(name, without=()):
    net = normplug.swap(make(without), mode_of(name))
    return normplug.unswap(net) if name == "unswapped" else net


def use(device):
    """Run the cells on a device, with the same bits in every run."""
    global DEVICE, X, Y, BATCHES
    DEVICE = torch.device(device)
    torch.manual_seed(1)
    X, Y = torch.randn(24, 3, 6, 6).to(DEVICE), torch.randint(4, (24,)).to(DEVICE)
    BATCHES = list(zip(X.split(8), Y.split(8), strict=True))
    if DEVICE.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


use("cpu")


@cache
def expected_of(one, mode):
    """A tool's result on the folded stock model, which the columns of this mode must equal."""
    torch.manual_seed(2)
    return one.run(folded(make(one.without), normplug.target_variance(mode)))


def outcome(one, name):
    """A cell: "works", NAN, "refused: ...", "refused by check: ..." or "silently wrong: ..."."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = expected_of(one, mode_of(name))
        except Exception as error:
            if DEVICE.type == "cpu":
                raise
            return f"not compared: the stock model fails: {str(error).strip().splitlines()[0]}"
        model = column(name, one.without)
        torch.manual_seed(2)
        try:
            got = one.run(model)
        except Exception as error:
            return f"refused: {str(error).strip().splitlines()[0]}"
        if has_nan(got) and not has_nan(expected):
            return NAN
        try:
            assert_same(got, expected, one.tolerance)
        except AssertionError as difference:
            try:
                normplug.check(model)
            except RuntimeError as error:
                return f"refused by check: {str(error).splitlines()[1].strip(' -')}"
            return f"silently wrong: {difference}"
    return "works"


def has_nan(values):
    leaves = tree_flatten(values)[0]
    return any(isinstance(t, torch.Tensor) and t.isnan().any().item() for t in leaves)


def assert_same(got, expected, tolerance):
    (got, got_spec), (expected, spec) = tree_flatten(got), tree_flatten(expected)
    assert got_spec == spec, f"{got_spec} is not {spec}"
    assert got, "nothing was compared"
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(
                a, b, rtol=tolerance, atol=tolerance / 10, check_dtype=False
            )
        else:
            assert a == b, f"{a} is not {b}"


def evaluate(model, x=None):
    with torch.no_grad():
        return model.eval()(X if x is None else x)


def parameters(model):
    """All parameters but the norms' weights, in which the two models differ by sqrt(tv)."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, NORMS)}
    return [p for p in model.parameters() if id(p) not in weights]


def statistics(model):
    """The BatchNorms' buffers; LayerNorm's exist in normplug only, and other norms have none."""
    norms = [m for m in model.modules() if isinstance(m, BATCH_NORM)]
    return [b.clone() for m in norms for b in m.buffers()]


def train(model, optimizer=None, after=lambda: None):
    """Train three steps; return losses, last gradients, statistics, and outputs in evaluation."""
    trained = parameters(model)
    optimizer = optimizer or torch.optim.SGD(trained, 0.05, momentum=0.9)
    model.train()
    losses = []
    for x, y in BATCHES:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.detach())
    gradients = [p.grad.clone() for p in trained if p.grad is not None]
    return losses, gradients, statistics(model), evaluate(model)


# Tools that rebuild norms.


@row("`nn.SyncBatchNorm.convert_sync_batchnorm`", refused=NAN)
def convert_sync_batchnorm(model):
    return evaluate(nn.SyncBatchNorm.convert_sync_batchnorm(model))


@row("Lightning `Trainer(sync_batchnorm=True)`", "lightning", refused=NAN)
def lightning_sync_batchnorm(model):
    from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

    plugin = TorchSyncBatchNorm()
    return evaluate(plugin.revert(plugin.apply(model)))


@row("timm `convert_sync_batchnorm`", "timm", refused=NAN)
def timm_convert_sync_batchnorm(model):
    import timm

    return evaluate(timm.layers.convert_sync_batchnorm(model))


@row("timm `convert_splitbn_model`", "timm", refused=NAN)
def timm_convert_splitbn_model(model):
    import timm

    model.bn = timm.layers.convert_splitbn_model(model.bn)
    return evaluate(model)


@row("timm `freeze_batch_norm_2d`", "timm", refused=NAN)
def timm_freeze_batch_norm_2d(model):
    import timm

    return evaluate(timm.layers.freeze_batch_norm_2d(model))


@row("`torch.func.replace_all_batch_norm_modules_`")
def replace_all_batch_norm_modules(model):
    torch.func.replace_all_batch_norm_modules_(model)
    return model.eval()(X), model.train()(X)


# Tools that read a norm's tensors.


@row("`nn.utils.fuse_conv_bn_eval`", refused=NAN)
def fuse_conv_bn_eval(model):
    model.eval()
    model.conv, model.bn = nn.utils.fuse_conv_bn_eval(model.conv, model.bn), nn.Identity()
    return evaluate(model)


@row("`nn.utils.fuse_linear_bn_eval`", refused=NAN)
def fuse_linear_bn_eval(model):
    model.eval()
    model.fc, model.bn1 = nn.utils.fuse_linear_bn_eval(model.fc, model.bn1), nn.Identity()
    return evaluate(model)


@row(
    "`torch.ao.quantization.fuse_modules`",
    refused="(did not find fuser method|[Cc]annot fuse)",
    always=True,
)
def fuse_modules(model):
    from torch.ao.quantization import fuse_modules

    return evaluate(fuse_modules(model.eval(), [["conv", "bn"]]))


@row("`torch.fx.experimental.optimization.fuse`")
def fx_fuse(model):
    from torch.fx.experimental.optimization import fuse

    return evaluate(fuse(model.eval()))


@row("timm `reparameterize_model`", "timm", refused=NAN)
def timm_reparameterize_model(model):
    from timm.models.levit import ConvNorm
    from timm.utils.model import reparameterize_model

    model.conv.bias = None
    block = ConvNorm(3, 8, 3)
    block.linear, block.bn = model.conv, model.bn
    model.conv, model.bn = block, nn.Identity()
    # On the CPU, where it creates new layers.
    return evaluate(reparameterize_model(model.eval().cpu()).to(DEVICE))


@row(
    "`torch.utils.mkldnn.to_mkldnn`",
    refused="to_mkldnn would drop the target variance of a BatchNorm2d in mode golden",
    cpu=True,
)
def to_mkldnn(model):
    from torch.utils import mkldnn

    head = nn.Sequential(model.conv, model.bn, model.relu).eval()
    return mkldnn.to_mkldnn(head)(X.to_mkldnn()).to_dense()


@row("`nn.TransformerEncoder`, its fused inference")
def transformer_encoder(model):
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, device=DEVICE)
    layer.norm1, layer.norm2 = model.norm, copy.deepcopy(model.norm)
    encoder = nn.TransformerEncoder(layer, 2)
    x, padding = (
        torch.randn(2, 5, 32).to(DEVICE),
        torch.arange(5) >= torch.tensor([[5], [3]]),
    )
    padding = padding.to(DEVICE)
    trained, validated = encoder.train()(x), evaluate(encoder, x)
    with torch.no_grad():
        return trained, validated, encoder(x, src_key_padding_mask=padding)


# Compilers and exporters.


@row(
    "`torch.jit.script`",
    refused="torch.jit.script cannot compile a BatchNorm2d in mode",
    always=True,
)
def jit_script(model):
    return evaluate(torch.jit.script(model.eval()))


@row("`torch.jit.trace`, `freeze`, `optimize_for_inference`")
def jit_trace(model):
    traced = torch.jit.freeze(torch.jit.trace(model.eval(), X))
    return evaluate(torch.jit.optimize_for_inference(traced), X)


@row("`torch.fx.symbolic_trace`")
def symbolic_trace(model):
    return train(torch.fx.symbolic_trace(model))


@row("torchvision `create_feature_extractor`", "torchvision")
def create_feature_extractor(model):
    from torchvision.models.feature_extraction import create_feature_extractor

    return evaluate(create_feature_extractor(model, ["bn", "instance", "norm", "rms"]))


@row("`torch.export`")
def export(model):
    batch = torch.export.Dim("batch", min=2, max=1024)  # a GPU allows 65,535
    program = torch.export.export(model.eval(), (X,), dynamic_shapes=({0: batch},))
    with io.BytesIO() as file:
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    return program.module()(X[:5])


def run_onnx(model, **options):
    import onnxruntime

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        torch.onnx.export(model.eval(), (X,), path, input_names=["x"], **options)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {"x": X.numpy()})[0])


@row(  # torch 2.6 is incompatible with today's onnxscript
    "`torch.onnx.export(dynamo=True)`, ONNX Runtime",
    "torch>=2.8",
    "onnx",
    "onnxscript",
    "onnxruntime",
    cpu=True,
)
def onnx_dynamo(model):
    return run_onnx(model, dynamo=True, verbose=False)


@row(
    "`torch.onnx.export(dynamo=False)`, ONNX Runtime; has no RMSNorm",
    "onnx",
    "onnxruntime",
    without=("rms",),
    cpu=True,
)
def onnx_torchscript(model):
    return run_onnx(model, dynamo=False)


@row("`torch.compile`, AOTAutograd")
def compile_aot(model):
    torch.compiler.reset()
    return train(torch.compile(model, backend="aot_eager", fullgraph=True))


SLOW = ("group", "instance")  # to compile for the CPU


@row(
    "`torch.compile`, Inductor, training; no GroupNorm, InstanceNorm", "c++", without=SLOW
)
def compile_inductor(model):
    torch.compiler.reset()
    return train(torch.compile(model, fullgraph=True))


@row(
    "`torch.compile`, Inductor, freezing; no GroupNorm, InstanceNorm", "c++", without=SLOW
)
def compile_freezing(model):
    import torch._inductor.config

    torch.compiler.reset()
    with torch._inductor.config.patch(freezing=True):
        return evaluate(torch.compile(model.eval(), fullgraph=True))


# Averages of weights.


@row("`swa_utils.update_bn`")
def update_bn(model):
    torch.optim.swa_utils.update_bn(BATCHES, model)
    return statistics(model), evaluate(model)


@row("`swa_utils.AveragedModel`, then `update_bn`")
def averaged_model(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, after=lambda: average.update_parameters(model))
    torch.optim.swa_utils.update_bn(BATCHES, average)
    return evaluate(average)


@row("`swa_utils.AveragedModel`, EMA of buffers too")
def averaged_model_ema(model):
    mean = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=mean, use_buffers=True
    )
    train(model, after=lambda: average.update_parameters(model))
    return statistics(average), evaluate(average)


@row("EMA over a deep copy's `state_dict`")
def deepcopy_ema(model):
    average = copy.deepcopy(model)

    def update():
        state = model.state_dict()
        for name, value in average.state_dict().items():
            value.copy_(value.float().lerp(state[name].float(), 0.5))

    train(model, after=update)
    return evaluate(average)


def fit(model, *callbacks, epochs=2, **options):
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(parameters(self.net), 0.05)

    off = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
    )
    with tempfile.TemporaryDirectory() as directory:
        Trainer(
            accelerator=DEVICE.type,
            devices=1,
            callbacks=list(callbacks),
            max_epochs=epochs,
            default_root_dir=directory,
            **dict.fromkeys(off, False),
            **options,
        ).fit(Module(), DataLoader(TensorDataset(X, Y), 8))
    return statistics(model), evaluate(model)


@row("Lightning `StochasticWeightAveraging`", "lightning")
def lightning_swa(model):
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return fit(model, StochasticWeightAveraging(0.01, swa_epoch_start=1), epochs=3)


@row("Lightning `EMAWeightAveraging`", "lightning")
def lightning_ema(model):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return fit(model, EMAWeightAveraging(decay=0.5))


@row(
    "Lightning `precision='bf16-mixed'`, gradient accumulation",
    "lightning",
    tolerance=0.1,
)
def lightning_mixed(model):
    return fit(model, precision="bf16-mixed", accumulate_grad_batches=3)


# torch.func and Opacus.


@row("`torch.func.vmap` over `stack_module_state`")
def vmap_models(model):
    models = [model.eval(), copy.deepcopy(model)]
    with torch.no_grad():
        models[1].conv.weight.mul_(2)
    stacked = torch.func.stack_module_state(models)
    skeleton = copy.deepcopy(model).to("meta")

    def one(params, buffers, x):
        return torch.func.functional_call(skeleton, (params, buffers), (x,))

    return torch.func.vmap(one, in_dims=(0, 0, None))(*stacked, X)


def functional(model):
    params = {k: p.detach() for k, p in model.named_parameters()}
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    return params, lambda params, x: torch.func.functional_call(
        model, (params, buffers), (x,)
    )


@row("`torch.func.grad`, in training")
def func_grad(model):
    torch.func.replace_all_batch_norm_modules_(model)
    params, call = functional(model.train())
    gradients = torch.func.grad(lambda p: F.cross_entropy(call(p, X), Y))(params)
    return gradients["conv.weight"], gradients["norm.bias"], gradients["head.weight"]


@row("per-sample gradients, `vmap` of `grad`")
def per_sample_gradients(model):
    params, call = functional(model.eval())

    def loss(p, x, y):
        return F.cross_entropy(call(p, x[None]), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, X, Y)
    return gradients["conv.weight"], gradients["bn1.bias"]


@row("`torch.func.jvp`, forward-mode")
def func_jvp(model):
    params, call = functional(model.eval())
    return torch.func.jvp(lambda x: call(params, x), (X,), (torch.ones_like(X),))


@row("`torch.autograd.forward_ad`")
def forward_ad(model):
    import torch.autograd.forward_ad as fwd

    with fwd.dual_level():
        y = model.eval()(fwd.make_dual(X, torch.ones_like(X)))
        return fwd.unpack_dual(y).tangent


def known_to_opacus(model):
    """The model in training mode; swapping it again registers normplug's norms with Opacus."""
    ours = [m for m in model.modules() if isinstance(m, normplug.LayerNorm)]
    if ours:
        normplug.swap(model, ours[0].target_variance)
    return model.train()


@row("Opacus `ModuleValidator.validate`: says the same", "opacus")
def opacus_validate(model):
    from opacus.validators import ModuleValidator

    errors = ModuleValidator.validate(known_to_opacus(model))
    return [type(error).__name__ for error in errors]


def private(model, optimizer):
    """Model and optimizer as Opacus wraps them for X, without noise or effective clipping."""
    from opacus import PrivacyEngine

    model, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(X, Y), 8),
        noise_multiplier=0.0,
        max_grad_norm=1e6,
        poisson_sampling=False,
    )
    return model, optimizer


@row("Opacus `ModuleValidator.fix`, then a private step", "opacus")
def opacus_fix(model):
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(known_to_opacus(model))
    optimizer = torch.optim.SGD(parameters(model), 0.05)
    return train(*private(model, optimizer))[0], evaluate(model)


# Parallel training, each in one process.


@contextmanager
def process_group():
    dist = torch.distributed
    backend = "gloo" if DEVICE.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@row("`DistributedDataParallel`")
def ddp(model):
    with process_group():
        return train(nn.parallel.DistributedDataParallel(model))


@row("`DataParallel`")
def data_parallel(model):
    return train(nn.DataParallel(model))


def in_fsdp1(model, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    return FSDP(model, device_id=DEVICE, **options)


@row("FSDP1, `use_orig_params=True`")
def fsdp1(model):
    with process_group():
        return train(in_fsdp1(model, use_orig_params=True))


def in_fsdp2(model, *parts):
    from torch.distributed.fsdp import fully_shard

    for part in (*parts, model):
        fully_shard(part)
    return model


@row("FSDP2, `fully_shard`", "torch>=2.14")
def fsdp2(model):
    with process_group():
        losses, gradients, statistics, y = train(
            in_fsdp2(model, model.bn, model.group, model.norm, model.rms)
        )
        return losses, [g.full_tensor() for g in gradients], statistics, y


@row("`SequenceParallel`, of LayerNorm and RMSNorm")
def sequence_parallel(model):
    from torch.distributed.tensor import distribute_module, init_device_mesh
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    torch.manual_seed(3)
    with process_group():
        mesh = init_device_mesh(DEVICE.type, (1,))
        block = nn.Sequential(model.norm, nn.Linear(32, 32, device=DEVICE), model.rms)
        distribute_module(block[1], mesh)
        plan = {str(i): SequenceParallel(sequence_dim=0) for i in (0, 2)}
        parallelize_module(block, mesh, plan)
        x = torch.arange(96.0, device=DEVICE).reshape(3, 32).sin().requires_grad_()
        y = block(x).to_local()
        y.square().sum().backward()
        return y, x.grad, block[0].bias.grad.full_tensor()


@row("accelerate `Accelerator().prepare`", "accelerate")
def accelerate_prepare(model):
    from accelerate import Accelerator

    optimizer = torch.optim.SGD(parameters(model), 0.05, momentum=0.9)
    return train(*Accelerator(cpu=DEVICE.type == "cpu").prepare(model, optimizer))


@row("accelerate `cpu_offload`", "accelerate", cpu=True)
def accelerate_offload(model):
    from accelerate import cpu_offload

    return evaluate(cpu_offload(model, execution_device="cpu"))


# Training with less memory or precision.


def checkpointed(model, use_reentrant):
    y = checkpoint(model.train(), X.clone().requires_grad_(), use_reentrant=use_reentrant)
    F.cross_entropy(y, Y).backward()
    return [p.grad for p in parameters(model)], statistics(model), evaluate(model)


@row("`torch.utils.checkpoint`, not reentrant")
def checkpoint_not_reentrant(model):
    return checkpointed(model, use_reentrant=False)


@row("`torch.utils.checkpoint`, reentrant")
def checkpoint_reentrant(model):
    return checkpointed(model, use_reentrant=True)


@row("gradient accumulation")
def accumulation(model):
    model.train()
    for x, y in BATCHES:
        F.cross_entropy(model(x), y).backward()
    return [p.grad for p in parameters(model)], statistics(model), evaluate(model)


@row("`torch.autocast`, bfloat16", tolerance=0.1)
def autocast(model):
    with torch.autocast(DEVICE.type, torch.bfloat16):
        # Before the steps, after which bfloat16 alone changes the outputs by most of their size.
        y = evaluate(model)
        losses, _, statistics, _ = train(model)
    return losses, statistics, y


@row("`torch.amp.GradScaler`")
def grad_scaler(model):
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    optimizer = torch.optim.SGD(parameters(model), 0.05)
    model.train()
    for x, y in BATCHES:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return statistics(model), evaluate(model)


@row("torchao `quantize_`, int8 weights", "torch>=2.11", "torchao")  # for today's torchao
def torchao_int8(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.eval(), Int8WeightOnlyConfig())
    return evaluate(model)


@row("`torch.ao.quantization.quantize_dynamic`", cpu=True)
def quantize_dynamic(model):
    return evaluate(torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}))


@row(
    "`torch.ao.quantization.prepare`, `convert`; GroupNorm, InstanceNorm2d, LayerNorm",
    cpu=True,
)
def quantize_static(model):
    from torch.ao.quantization import QuantWrapper, convert, get_default_qconfig, prepare

    outputs = []
    for norm in (model.group, model.instance, model.norm):
        x = X.flatten(1)[:, :32] if norm is model.norm else model.conv(X).detach()
        wrapped = QuantWrapper(nn.Sequential(nn.Identity(), norm)).eval()
        wrapped.qconfig = get_default_qconfig("fbgemm")
        prepared = prepare(wrapped)
        prepared(x)
        outputs.append(convert(prepared)(x))
    return outputs


# Tools that look layers up by their exact class.


@row("captum `LRP`; has only BatchNorm2d", "captum")
def captum_lrp(model):
    from captum.attr import LRP

    normplug.swap(nn.LayerNorm(1))  # registers with captum, now that it is imported
    pooled = nn.AdaptiveAvgPool2d(1)
    part = nn.Sequential(model.conv, model.bn, model.relu, pooled).eval()
    return LRP(part).attribute(X.clone().requires_grad_(), target=(0, 0, 0))


@row("thop `profile`", "thop")
def thop_profile(model):
    import thop

    normplug.swap(nn.LayerNorm(1))
    return thop.profile(model, (X,), verbose=False)


@row("ptflops `get_model_complexity_info`", "ptflops", cpu=True)
def ptflops_complexity(model):
    import ptflops

    normplug.swap(nn.LayerNorm(1))
    options = {"as_strings": False, "print_per_layer_stat": False, "backend": "pytorch"}
    return ptflops.get_model_complexity_info(model, tuple(X.shape[1:]), **options)


@row(
    "BackPACK `BatchGrad`; has only BatchNorm",
    "backpack",
    refused="no attribute 'grad_batch'",
    always=True,
)
def backpack_batch_grad(model):
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    part = extend(nn.Sequential(model.conv, model.bn, nn.Flatten(), nn.Softmax(1)).eval())
    with backpack(BatchGrad()):
        extend(nn.CrossEntropyLoss())(part(X), Y).backward()
    return [p.grad_batch for p in part.parameters()]


@row("`nn.utils.parametrizations.weight_norm`, `spectral_norm`")
def parametrizations(model):
    torch.manual_seed(3)
    nn.utils.parametrizations.weight_norm(model.fc)
    nn.utils.parametrizations.spectral_norm(model.conv)
    return train(model)


@row("`nn.utils.prune`, of the norms' weights")
def prune(model):
    from torch.nn.utils import prune

    for layer in (model.bn, model.group, model.instance, model.norm, model.rms):
        prune.l1_unstructured(layer, "weight", 0.5)
    return evaluate(model)


@row("weight decay by type of layer")
def weight_decay_groups(model):
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if isinstance(module, NORMS) or name == "bias"
    ]


# normplug's own verbs, which take stock models, too.


@row("`normplug.freeze`, training, `normplug.thaw`, training")
def frozen(model):
    held = train(normplug.freeze(model))
    return held, train(normplug.thaw(model))


@row("`normplug.recalibrate`")
def recalibrated(model):
    normplug.recalibrate(model, BATCHES)
    return statistics(model), evaluate(model)


@row("`normplug.watch`, `normplug.sync_buffers`")
def watched(model):
    with normplug.watch(model, every=2) as w:
        trained = train(normplug.sync_buffers(model))
    return trained, [
        torch.tensor([row.input_variance, row.affine_variance]) for row in w.rows
    ]


@row("`normplug.param_groups`")
def grouped(model):
    names = {id(p): name for name, p in model.named_parameters()}
    return [
        [names[id(p)] for p in g["params"]] for g in normplug.param_groups(model, 0.1)
    ]


@row("`normplug.doctor`")
def examined(model):
    findings = normplug.doctor(model, X).findings
    return [(row.layer, row.finding) for row in findings], train(model)


# Saving and loading.


def reloaded(value, weights_only):
    """Save the value with `torch.save`, and load it with `torch.load`."""
    with io.BytesIO() as file:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=weights_only)


@row("whole-module `pickle` and `torch.save`")
def pickled(model):
    return evaluate(reloaded(pickle.loads(pickle.dumps(model)), weights_only=False))


@row("`torch.save(model.state_dict())`, `weights_only=True`")
def saved_state(model):
    twin = copy.deepcopy(model)
    train(twin)
    twin.load_state_dict(reloaded(model.state_dict(), weights_only=True))
    return evaluate(twin)


@row("safetensors `save_model`, `load_model`", "safetensors")
def safetensors_model(model):
    from safetensors.torch import load_model, save_model

    twin = copy.deepcopy(model)
    train(twin)
    with tempfile.TemporaryDirectory() as directory:
        save_model(model, f"{directory}/model.safetensors")
        load_model(twin, f"{directory}/model.safetensors")
    return evaluate(twin)


def measured():
    """A row for each tool: its cells by column, or what it `lacks`, and the versions."""
    packages = sorted({need for one in ROWS for need in one.needs if is_package(need)})
    origin = stamp(DEVICE.type == "cuda", *packages)
    for one in ROWS:
        if one.lacks:
            yield {"tool": one.tool, "lacks": one.lacks, **origin}
        else:
            yield {
                "tool": one.tool,
                **{name: outcome(one, name) for name in COLUMNS},
                **origin,
            }


def is_package(need):
    return need != "c++" and not need.startswith("torch>=")


def line_of(found):
    """A row of the table: the first sentence of each cell."""
    if "lacks" in found:
        return f"| {found['tool']} | not run: no {found['lacks']} | | |"
    cells = [found[name].split(". ")[0].replace("normplug: ", "") for name in COLUMNS]
    return f"| {found['tool']} | {' | '.join(cells)} |"


def page(rows):
    """The page of the documentation, from the rows of a results file."""
    from normplug._pictures import short_commit  # needs matplotlib, unlike the cells

    first = rows[0]
    lines = "\n".join(map(line_of, rows))
    origin = [
        first["device"],
        first["date"][:10],
        f"commit {short_commit(first['commit'])}",
    ]
    origin += [f"{name} {first[name]}" for name in first if name not in NOT_VERSIONS]
    return f"""# Compatibility with other tools

This page is about tools. The [versions of torch](versions.md) and
[344 architectures of other libraries](zoo.md) that were tested have their own pages.

Each cell applies one tool to a small model of a convolution and linear layers with
BatchNorm2d, GroupNorm, InstanceNorm2d, BatchNorm1d, LayerNorm and RMSNorm. It compares
the result with that of the same tool on the stock model of the same function: outputs,
and for tools that train also losses, gradients and statistics. *Refused* means an error,
shown by its first sentence, or outputs of nan, which a tool returns if it computes with
the `eps` of a layer in mode golden. Use such a tool before `swap`, or after
`normplug.unswap`.
`normplug.check(model, batch)` finds tools that silently change the outputs. Tools that
look layers up by their exact class treat a swapped layer like the stock one if they were
imported before `swap`.

oneDNN's ReLU turns nan into 0. So on a CPU the outputs may be zeros instead of nan, if
`torch.jit.optimize_for_inference` or Inductor with `freezing=True` runs the model
after such a tool. `normplug.check(model)` still finds that a layer was rebuilt.

| tool | swapped, standard | swapped, golden | after `unswap` |
|---|---|---|---|
{lines}

`python benchmarks/matrix.py` ([results](results/compatibility.json)): {", ".join(origin)}.
"""


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write the table of compatibility.")
    docs = Path(__file__).parents[1] / "docs"
    parser.add_argument("-o", "--output", type=Path, help="the page")
    parser.add_argument("--json", type=Path, help="the rows")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not (arguments.output and arguments.json):
        parser.error(
            "the documentation has the rows of the CPU: pass --output and --json"
        )
    output = arguments.output or docs / "compatibility.md"
    results = arguments.json or docs / "results" / "compatibility.json"
    use(arguments.device)
    rows = []
    for found in measured():
        print(line_of(found), flush=True)
        rows.append(found)
    results.unlink(missing_ok=True)
    add_to_file(results, rows)
    write_file(output, page(rows))
    wrong = [
        found["tool"]
        for found in rows
        if any(found.get(name, "").startswith("silently") for name in COLUMNS)
    ]
    if wrong:
        raise SystemExit(f"silently wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
