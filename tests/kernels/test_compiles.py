"""Every kernel compiles to machine code, which needs no GPU.

The interpreter accepts Python that the compiler of an older Triton rejects.
"""

import re
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from launches import (
    H100,
    JOIN,
    SHARED,
    batch_norm_launches,
    group_norm_launches,
    launches_of,
    row_call,
    row_launches,
)
from normplug._kernels import launch, tiles
from normplug._layouts import Levels

pytestmark = [
    pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(
        not launch.BUILDS, reason="on this Triton the kernels are not used"
    ),
]
FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
INTEGERS = {"counters": torch.int64, "tracked": torch.int64, "bits": torch.uint8}
TILES = ("x", "y", "dy", "dx", "residual", "dresidual", "total", "peaks")


def compiled(made, dtype, target=H100, **others):
    """Compile a launch's kernel; `others` are the dtypes of tensors that differ from `dtype`."""
    acc = FLOAT64 if dtype == FLOAT64 else FLOAT32
    usual = (
        dict.fromkeys(made.pointers, acc)
        | dict.fromkeys(TILES, dtype)
        | INTEGERS
        | others
    )
    job = made.job([usual[name] for name in made.pointers])
    return triton.compile(ASTSource(*job[:4]), target=target, options=job.options)


PARAMETER = re.compile(r"\.param \.([uf])(32|64)\b")


def check(made, dtype, **others):
    """Check that a kernel compiles, and that the host path in C++ is told its parameters."""
    kernel = compiled(made, dtype, **others)
    assert kernel.asm["cubin"]
    entry = kernel.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0]
    sizes = [int(bits) // 8 for _, bits in PARAMETER.findall(entry)]
    # What the first launch sets, which needs a GPU.
    made._function, made._metadata = 1, kernel.packed_metadata
    made._signature = kernel.src.signature
    made._run = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0)
    told = made.compiled()
    count = len(told.parameters)
    assert [size for _, _, size in told.parameters] == sizes[:count]
    assert sizes[count:] in ([8], [8, 8])  # scratch memory, of which the kernels use none
    assert kernel.metadata.global_scratch_size == 0
    assert getattr(kernel.metadata, "profile_scratch_size", 0) == 0
    places = [place for place, _, _ in told.parameters if place >= 0]
    assert places == [*range(len(made.pointers))]
    assert told.threads == 32 * kernel.metadata.num_warps
    assert told.shared == kernel.metadata.shared
    assert told.cooperative == made._constants.get("launch_cooperative_grid", False)
    made._run.global_scratch_size = 8
    assert made.compiled() is None


BATCH_NORMS = {
    "planes": (128, 256, 3136, False),
    "columns, own rows": (128, 256, 196, True),
    "columns, items in phases": (128, 256, 3136, True),
    "columns, a slab alone": (64, 512, 1, True),
    "small planes": (64, 512, 49, False),
}


RELU = {"activation": "relu"}
LEAKY = {"activation": ("leaky_relu", 0.2)}
CONSTANT = {"training": False, "constant": True}
ONE_OF_EACH = ("planes", "columns, own rows", "small planes")


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        *((name, BFLOAT16, RELU) for name in BATCH_NORMS),
        *((name, BFLOAT16, RELU | {"join": JOIN}) for name in BATCH_NORMS),
        *((name, BFLOAT16, RELU | CONSTANT) for name in BATCH_NORMS),
        *((name, FLOAT64, LEAKY) for name in ONE_OF_EACH),
        ("columns, own rows", FLOAT64, RELU | {"join": JOIN}),
    ],
)
def test_batch_norm_compiles(name, dtype, options):
    residual = "constant" not in options
    for made in batch_norm_launches(BATCH_NORMS[name], dtype, residual, **options):
        check(made, dtype)


@pytest.mark.parametrize("join", [0, JOIN], ids=["alone", "joined"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT64], ids=str)
@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm_compiles_with_the_norm_of_its_residual(name, dtype, join):
    activation = "relu" if dtype == BFLOAT16 else "silu"
    for options in (
        {"residual": False, "for_residual": True},
        {"residual": True, "residual_norm": True, "activation": activation},
    ):
        made = batch_norm_launches(BATCH_NORMS[name], dtype, **options, join=join)
        for each in made:
            check(each, dtype)


@pytest.mark.parametrize(
    ("name", "join"), [*((name, 0) for name in BATCH_NORMS), ("columns, own rows", JOIN)]
)
def test_batch_norm_with_safe_statistics_compiles(name, join):
    others = {"join": join, "safe": True}
    forward, _ = batch_norm_launches(BATCH_NORMS[name], BFLOAT16, False, **others)
    check(forward, BFLOAT16)


@pytest.mark.parametrize(
    ("width", "spacing", "dtype"),
    [
        *(
            (width, width, dtype)
            for width in (768, 16384, 131072)
            for dtype in (BFLOAT16, FLOAT64)
        ),
        (768, 2**32, BFLOAT16),
        (768, Levels(197, 768, 768 * 128), BFLOAT16),
    ],
    ids=str,
)
def test_layer_norm_compiles(width, spacing, dtype):
    for made in row_launches(4096, width, dtype, spacing, residual=True, running=True):
        check(made, dtype, dtotal=dtype)


# N, groups, channels per group, values per plane, and whether channels are adjacent in memory.
GROUP_NORMS = {
    "planes, tiles": (16, 32, 10, 4096, False),
    "planes, held": (16, 32, 2, 196, False),
    "planes, read twice": (16, 32, 20, 1024, False),
    "columns, items": (16, 32, 10, 4096, True),
    "columns, alone": (256, 32, 1, 64, True),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, BFLOAT16) for name in GROUP_NORMS),
        *((name, FLOAT64) for name in ("planes, read twice", "columns, alone")),
    ],
)
def test_group_norm_compiles(name, dtype):
    for made in group_norm_launches(GROUP_NORMS[name], dtype):
        tile = made._constants["T"]
        assert bool(getattr(tile, "held", False)) == ("held" in name)
        assert bool(getattr(tile, "solo", False)) == ("alone" in name)
        check(made, dtype)


# Multiprocessors, and the bytes of shared memory of a program. Other tests compile for sm_90.
TARGETS = {
    "sm_75": (GPUTarget("cuda", 75, 32), 40, 64 << 10),  # T4
    "sm_80": (GPUTarget("cuda", 80, 32), 108, 163 << 10),  # A100
    "sm_86": (GPUTarget("cuda", 86, 32), 72, 99 << 10),  # A10
    "sm_89": (GPUTarget("cuda", 89, 32), 58, 99 << 10),  # L4
    "sm_100": (GPUTarget("cuda", 100, 32), 148, SHARED),  # B200
    "sm_120": (GPUTarget("cuda", 120, 32), 170, 99 << 10),  # RTX 5090
    "gfx942": (GPUTarget("hip", "gfx942", 64), 304, 64 << 10),  # MI300X
}


@pytest.mark.parametrize("name", TARGETS)
def test_each_family_compiles_for_every_target_without_a_card(name, monkeypatch):
    target, sms, shared = TARGETS[name]
    rocm = target.backend == "hip"
    monkeypatch.setattr(launch, "COOPERATIVE", not rocm)
    hip = triton.backends.backends["amd"].compiler
    # Older wheels of Triton lack the linker, so they get as far as the assembler.
    monkeypatch.setattr(hip, "path_to_rocm_lld", lambda: "true", raising=False)
    dtype = FLOAT16 if name == "sm_75" else BFLOAT16
    for made in (
        *batch_norm_launches((128, 256, 196, False), dtype, True, sms),
        *row_launches(4096, 768, dtype, 768, sms, shared, residual=True, running=True),
        *group_norm_launches((16, 32, 2, 196, False), dtype, sms),
        next(group_norm_launches((32, 32, 20, 1024, False), dtype, sms)),  # read twice
        # Those over columns take three times as long to compile: for the oldest target alone.
        *(
            batch_norm_launches((64, 512, 1, True), dtype, True, sms)
            if name == "sm_75"
            else ()
        ),
        *(
            group_norm_launches((16, 32, 8, 64, True), dtype, sms)
            if name == "sm_75"
            else ()
        ),
    ):
        kernel = compiled(made, dtype, target, dtotal=dtype)
        assert kernel.asm["amdgcn" if rocm else "cubin"]
        assert kernel.metadata.shared <= shared
        assert kernel.metadata.num_warps * target.warp_size <= 1024


@pytest.mark.parametrize(
    ("rows", "width", "spacing"),
    [(25216, 768, 768), (25216, 768, Levels(197, 768, 768 * 128)), (3, 24, 24)],
    ids=["even", "permuted", "narrow"],
)
def test_layer_norm_of_a_float32_stream_moves_no_tile_between_threads(
    rows, width, spacing
):
    """Else the compiler may reduce a row twice, and save other statistics than it normalises by."""
    narrow = {
        "x": BFLOAT16,
        "y": BFLOAT16,
        "dy": BFLOAT16,
        "weight": BFLOAT16,
        "bias": BFLOAT16,
    }
    for made, others in zip(
        row_launches(rows, width, FLOAT32, spacing, residual=True, running=True),
        (narrow, {"dy": BFLOAT16, "dtotal": FLOAT32, "weight": BFLOAT16}),
        strict=True,
    ):
        ir = compiled(made, FLOAT32, **others).asm["ttgir"]
        conversions = [line for line in ir.splitlines() if "convert_layout" in line]
        tile = made._constants["T"]
        height, steps, columns = tile.r.value, tile.u.value, tile.bc.value
        lanes = (height, steps) if tiles.STEP_AXIS.value == 1 else (steps, height)
        shape = "-> tensor<{}x{}x{}x".format(*lanes, columns)
        assert not [c for c in conversions if shape + "f32" in c or shape + "bf16" in c]


GATES = {"centred": False, "rounding": "input"}
MODULATED = {
    "gate last": {**GATES, "gate": "last"},
    "gate first, in groups": {**GATES, "gate": "first", "group_size": 512},
    "scales of samples": {"scales": (32, 1, 4096)},
    "one sample": {"scales": (1, 1, 4096), "centred": False},
    "scales of tokens": {"scales": (32, 64, 4096)},
}


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT64], ids=str)
@pytest.mark.parametrize("name", MODULATED)
def test_gated_and_adaptive_norms_compile(name, dtype):
    """Tiles of three tensors fit into shared memory, too, and into registers."""
    options = MODULATED[name]
    for batch, tokens in ((32, 64), (1, 1024)):
        scales = options.get("scales")
        if scales is not None:
            scales = (min(batch, scales[0]), tokens if scales[1] > 1 else 1, 4096)
        x = torch.empty(batch, tokens, 4096, dtype=dtype, device="meta")
        t, spec = row_call(x, **{**options, "scales": scales})
        plan = spec.plan(t)
        plan._machine = (132, SHARED, True)
        for made in launches_of(plan, t):
            of_x = dict.fromkeys(("dtotal", "residual"), dtype)
            check(made, dtype, **of_x)
            assert compiled(made, dtype, **of_x).metadata.shared <= SHARED


@pytest.mark.parametrize("width", [128, 4096, 131072])
def test_rms_norm_compiles(width):
    """With rows on three levels of strides, rounding before the weight, and a weight offset."""
    heads = Levels(64, 64 * 24 * width, 24 * width, 8, width)
    rms = {"centred": False, "weight_offset": 1.0, "rounding": "input"}
    for made in row_launches(4096, width, BFLOAT16, heads, **rms):
        check(made, BFLOAT16)
