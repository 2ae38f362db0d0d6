"""Which operations are measured on which inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]

BATCH_NORMS = ("bn", "bn_relu", "bn_add_relu")
LAYER_NORMS = ("ln", "ln_stats", "add_ln", "bias_ln")
RMS_NORMS = ("rms", "add_rms")
ROW_NORMS = (*LAYER_NORMS, *RMS_NORMS)
GROUP_NORMS = ("gn", "gn_silu", "in3d")
NORMS = {  # by their names in plots
    "BatchNorm": BATCH_NORMS,
    "LayerNorm": LAYER_NORMS,
    "RMSNorm": RMS_NORMS,
    "GroupNorm": GROUP_NORMS,
}
DTYPES = ("bfloat16", "float16", "float32", "float64")

HEADLINE_SHAPES: tuple[Shape, ...] = (
    (128, 256, 56, 56),  # ResNet-50 at 224 px: first stage, batch 128
    (256, 64, 112, 112),  # stem, batch 256: the largest tensor of the network
    (256, 512, 28, 28),  # second stage
    (256, 2048, 7, 7),  # last stage: many channels, little space
    (512, 64, 32, 32),  # ResNet-18 on CIFAR: stem and first stage, batch 512
)
FUSED_SHAPES = (HEADLINE_SHAPES[0], HEADLINE_SHAPES[2])  # where a residual block adds
FLOAT32_64_SHAPES: tuple[Shape, ...] = (
    (1024, 1000),  # features
    (1024, 100_000),
    (32, 64, 28, 28),  # images
    (128, 256, 56, 56),
)
SMALL_SHAPES: tuple[Shape, ...] = (
    (32, 128),
    (128, 512),
    (8, 16, 8, 8),
    (32, 64, 14, 14),
    (32, 64, 28, 28),
    (128, 64, 32, 32),
    (64, 512, 7, 7),
)
OTHER_SHAPES: tuple[Shape, ...] = (
    (4, 32, 16, 56, 56),  # video
    (64, 128, 1024),  # sequence
    (256, 1024, 14, 14),  # ResNet-50, third stage
    (32, 1024, 14, 14),  # the same with a small batch
    (512, 512, 4, 4),  # ResNet-18 on CIFAR: last stage
    (100, 33, 17, 19),  # no powers of two
)

WIDTHS = (256, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
WIDTHS_ROWS = 4096  # rows of each width
VIT_ROWS: Shape = (50432, 768)  # ViT-B/16 at 224 px, batch 256
FEW_WIDE_ROWS: Shape = (512, 8192)
# ConvNeXt-T at 224 px, batch 128: its first three stages.
CONVNEXT_ROWS: tuple[Shape, ...] = ((401_408, 96), (100_352, 192), (25_088, 384))
HEADS: Shape = (4096, 32, 128)  # queries of Llama-2-7B: 4096 tokens, 32 heads
SMALL_ROWS: tuple[Shape, ...] = ((32, 128), (512, 256), (4096, 256))
OTHER_ROWS: tuple[Shape, ...] = (
    (1_000_000, 64),  # attention heads
    (1024, 1000),  # divisible by 8, not by 16, and no power of two
    (4096, 12288),  # GPT-3
    (16, 262144),
    (1, 1048576),
)

# A diffusion model's UNet at 512 px, and the decoder that follows it.
GROUP_SHAPES: tuple[Shape, ...] = (
    (16, 320, 64, 64),
    (16, 640, 32, 32),
    (16, 1280, 16, 16),
    (4, 128, 512, 512),
)
VOLUME: Shape = (2, 32, 128, 128, 128)  # nnU-Net: first stage


class Case(NamedTuple):
    """One operation on one input.

    Attributes:
        op: a key of `kernels.OPS`.
        layout: "NCHW" for contiguous and "NHWC" for channels_last with any number of spatial
            dimensions, "NC" without them; "rows" for norms of rows.
        shape: of the input.
        dtype: of the input, by its name in torch.
    """

    op: str
    layout: str
    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} {self.layout} {shape_name(self.shape)} {self.dtype}"


def shape_name(shape: Sequence[int]) -> str:
    """The text of a shape, such as 128x256x56x56."""
    return "x".join(map(str, shape))


def layouts(op: str, shape: Shape) -> tuple[str, ...]:
    """The memory layouts of an operation's input of this shape."""
    if op in ROW_NORMS:
        return ("rows",)
    if len(shape) == 2:
        return ("NC",)
    return ("NCHW",) if len(shape) == 3 else ("NCHW", "NHWC")


def _cases(ops: Iterable[str], shapes: Sequence[Shape], dtypes: Sequence[str]) -> tuple[Case, ...]:
    """Every operation on every shape, in each layout and dtype."""
    return tuple(
        Case(op, layout, shape, dtype)
        for op in ops
        for shape in shapes
        for layout in layouts(op, shape)
        for dtype in dtypes
    )


HEADLINE = (
    *_cases(["bn"], HEADLINE_SHAPES, ["bfloat16"]),
    *_cases(["bn"], HEADLINE_SHAPES[:1], ["float32"]),
    *(
        Case(op, "NHWC", shape, "bfloat16")
        for op in ("bn_relu", "bn_add_relu")
        for shape in FUSED_SHAPES
    ),
    *_cases(["ln"], [(WIDTHS_ROWS, width) for width in WIDTHS], ["bfloat16", "float32"]),
    *_cases(["ln"], [VIT_ROWS, FEW_WIDE_ROWS], ["bfloat16", "float32"]),
    *_cases(["ln_stats"], [VIT_ROWS, (4096, 8192)], ["bfloat16"]),
    *_cases(["add_ln"], [VIT_ROWS, (8192, 4096)], ["bfloat16"]),
    *_cases(["bias_ln"], [FEW_WIDE_ROWS], ["bfloat16", "float32"]),
    *_cases(["bias_ln"], CONVNEXT_ROWS, ["bfloat16"]),
)
FLOAT32_64 = tuple(
    Case(op, layouts(op, shape)[0], shape, dtype)
    for op in BATCH_NORMS
    for shape in FLOAT32_64_SHAPES
    for dtype in ("float32", "float64")
)
SMALL = (
    *_cases(BATCH_NORMS, SMALL_SHAPES, ["bfloat16", "float32"]),
    *_cases(["ln", "ln_stats", "add_ln"], SMALL_ROWS, ["bfloat16", "float32"]),
)
FAMILIES = (
    *_cases(["rms"], [(4096, 4096), (4096, 8192), VIT_ROWS, HEADS], ["bfloat16"]),
    *_cases(["add_rms"], [(8192, 4096)], ["bfloat16"]),
    *_cases(["gn", "gn_silu"], GROUP_SHAPES, ["bfloat16"]),
    Case("in3d", "NHWC", VOLUME, "bfloat16"),
)
# BatchNorm where eager runs cuDNN's kernels: float16, channels_last.
CUDNN = (
    *(Case("bn", "NHWC", shape, "float16") for shape in HEADLINE_SHAPES),
    *(
        Case(op, "NHWC", shape, "float16")
        for op in ("bn_relu", "bn_add_relu")
        for shape in FUSED_SHAPES
    ),
)
FULL = (
    *HEADLINE,
    *FLOAT32_64,
    *SMALL,
    *FAMILIES,
    *CUDNN,
    *_cases(BATCH_NORMS, OTHER_SHAPES, ["bfloat16"]),
    *_cases(["bn"], HEADLINE_SHAPES[:1], ["float16"]),
    *_cases(["ln"], OTHER_ROWS, ["bfloat16", "float32"]),
    *_cases(["ln"], [VIT_ROWS, (4096, 8192)], ["float16"]),
)
SUITES: dict[str, tuple[Case, ...]] = {
    "headline": HEADLINE,
    "float32-float64": FLOAT32_64,
    "small": SMALL,
    "families": FAMILIES,
    "cudnn": CUDNN,
    "full": tuple(dict.fromkeys(FULL)),
}
WITH_CPU = ("float32-float64",)  # suites that also time torch on the CPU


def select(
    suite: str, ops: Sequence[str] | None, dtypes: Sequence[str] | None, only: str
) -> list[Case]:
    """The cases of a suite that pass all filters; `only` is text within the printed case."""
    return [
        case
        for case in SUITES[suite]
        if (not ops or case.op in ops)
        and (not dtypes or case.dtype in dtypes)
        and only in str(case)
    ]
