"""Time the norms against the same work in torch and other packages: the kernels of docs/speed.md.

python benchmarks/kernels.py --suite headline --json kernels.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import rivals
from normplug.bench import op
from normplug.bench.ops import OPS, Case
from normplug.bench.rows import add_to_file
from normplug.bench.timing import ready

Shape = tuple[int, ...]
BATCH_NORMS = ("batch_norm", "batch_norm_relu", "batch_norm_add_relu")
HEADLINE: tuple[Shape, ...] = (
    (128, 256, 56, 56),  # ResNet-50 at 224 px: first stage, batch 128
    (256, 64, 112, 112),  # stem, batch 256: the largest tensor of the network
    (256, 512, 28, 28),  # second stage
    (256, 2048, 7, 7),  # last stage: many channels, little space
    (512, 64, 32, 32),  # ResNet-18 on CIFAR: stem and first stage, batch 512
)
FUSED = (HEADLINE[0], HEADLINE[2])  # where a residual block adds
VIT: Shape = (50432, 768)  # ViT-B/16 at 224 px, batch 256
WIDTHS = tuple((4096, width) for width in (256, 768, *(2**n for n in range(10, 18))))
CONVNEXT = ((401_408, 96), (100_352, 192), (25_088, 384))  # ConvNeXt-T at 224 px, batch 128
HEADS: Shape = (4096, 32, 128)  # queries of Llama-2-7B: 4096 tokens, 32 heads
UNET: tuple[Shape, ...] = (  # of a diffusion model at 512 px, and the decoder that follows it
    (16, 320, 64, 64),
    (16, 640, 32, 32),
    (16, 1280, 16, 16),
    (4, 128, 512, 512),
)
VOLUME: Shape = (2, 32, 128, 128, 128)  # nnU-Net: first stage
PLAIN: tuple[Shape, ...] = ((1024, 1000), (1024, 100_000), (32, 64, 28, 28), (128, 256, 56, 56))
FEATURES: tuple[Shape, ...] = ((32, 128), (128, 512))
SMALL: tuple[Shape, ...] = (
    *FEATURES,
    (8, 16, 8, 8),
    (32, 64, 14, 14),
    (32, 64, 28, 28),
    (128, 64, 32, 32),
    (64, 512, 7, 7),
)
SMALL_ROWS: tuple[Shape, ...] = ((32, 128), (512, 256), (4096, 256))
HALF, BOTH, WIDE = ("bfloat16",), ("bfloat16", "float32"), ("float32", "float64")


def cases(
    ops: str | Sequence[str],
    shapes: Iterable[Shape],
    dtypes: Sequence[str] = HALF,
    layout: str | None = None,
) -> list[Case]:
    """Every operation on every shape, in each layout (or one of them) and dtype."""
    return [
        Case(name, each, shape, dtype)
        for name in ([ops] if isinstance(ops, str) else ops)
        for shape in shapes
        for each in ([layout] if layout else OPS[name].layouts(shape))
        for dtype in dtypes
    ]


def _contiguous(shapes: Iterable[Shape], dtypes: Sequence[str]) -> list[Case]:
    return [case for case in cases(BATCH_NORMS, shapes, dtypes) if case.layout != "NHWC"]


SUITES = {
    "headline": [
        *cases("batch_norm", HEADLINE),
        *cases("batch_norm", HEADLINE[:1], ["float32"]),
        *cases(BATCH_NORMS[1:], FUSED, layout="NHWC"),
        *cases("layer_norm", [*WIDTHS, VIT, (512, 8192)], BOTH),
        *cases("layer_norm_stats", [VIT, (4096, 8192)]),
        *cases("add_layer_norm", [VIT, (8192, 4096)]),
        *cases("bias_layer_norm", [(512, 8192)], BOTH),
        *cases("bias_layer_norm", CONVNEXT),
    ],
    "float32-float64": _contiguous(PLAIN, WIDE),
    "small": [
        *cases(BATCH_NORMS, SMALL, BOTH),
        *cases(["layer_norm", "layer_norm_stats", "add_layer_norm"], SMALL_ROWS, BOTH),
    ],
    "families": [
        *cases("rms_norm", [(4096, 4096), (4096, 8192), VIT, HEADS]),
        *cases("add_rms_norm", [(8192, 4096)]),
        *cases(["group_norm", "group_norm_silu"], UNET),
        *cases("instance_norm", [VOLUME], layout="NHWC"),
    ],
    # BatchNorm where eager runs cuDNN's kernels.
    "cudnn": [
        *cases("batch_norm", HEADLINE, ["float16"], "NHWC"),
        *cases(BATCH_NORMS[1:], FUSED, ["float16"], "NHWC"),
    ],
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", choices=SUITES, default="headline")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    providers = (*op.PROVIDERS, *rivals.PROVIDERS)
    parser.add_argument("--provider", choices=providers, action="append", help="default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file")
    a = parser.parse_args(argv)
    found = [case for case in SUITES[a.suite] if a.only in str(case)]
    if not found:
        parser.error(f"no case of suite {a.suite} has {a.only!r} in its name")
    device = ready(a.device)
    chosen = tuple(a.provider or providers)
    own = [name for name in op.PROVIDERS if name in chosen]
    for case in found:
        others = rivals.of(case.op, chosen)
        for rows in op.run([case], device, None, providers=own, others=others):
            add_to_file(a.json, [row | {"suite": a.suite} for row in rows])
            print(rows, flush=True)


if __name__ == "__main__":
    main()
