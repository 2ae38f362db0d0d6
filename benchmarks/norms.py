"""Time the norms against the same work in torch and other packages: the kernels of docs/speed.md.

python benchmarks/norms.py --suite headline --json norms.json
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import partial

import rivals
import script
from normplug.bench.op import PROVIDERS, cases, measure_op
from normplug.bench.rows import Rows

BATCH_NORMS = ("batch_norm", "batch_norm_relu", "batch_norm_add_relu")
HEADLINE = [
    (128, 256, 56, 56),  # ResNet-50 at 224 px: first stage, batch 128
    (256, 64, 112, 112),  # stem, batch 256: the largest tensor of the network
    (256, 512, 28, 28),  # second stage
    (256, 2048, 7, 7),  # last stage: many channels, little space
    (512, 64, 32, 32),  # ResNet-18 on CIFAR: stem and first stage, batch 512
]
FUSED = [HEADLINE[0], HEADLINE[2]]  # where a residual block adds
VIT = (50432, 768)  # ViT-B/16 at 224 px, batch 256
WIDTHS = [(4096, width) for width in (256, 768, *(2**n for n in range(10, 18)))]
HEADS = (4096, 32, 128)  # queries of Llama-2-7B: 4096 tokens, 32 heads
GATED = [  # of Mamba2 2.7B and 130M, and 16,384 tokens of a wide hybrid
    (8192, 4096),
    (8192, 5120),
    (8192, 1536),
    (16384, 8192),
]
ADAPTIVE = [  # of DiT-XL/2 at 256 px, SD3 and Flux at 1024 px, and a wide stream
    (256, 256, 1152),
    (8, 4096, 1536),
    (4, 4096, 3072),
    (8, 1024, 4096),
]
UNET = [  # of a diffusion model at 512 px, and the decoder that follows it
    (16, 320, 64, 64),
    (16, 640, 32, 32),
    (16, 1280, 16, 16),
    (4, 128, 512, 512),
]
VOLUME = (2, 32, 128, 128, 128)  # nnU-Net: first stage
PLAIN = [(1024, 1000), (1024, 100_000), (32, 64, 28, 28), (128, 256, 56, 56)]
SMALL = [(32, 128), (128, 512), (8, 16, 8, 8), (32, 64, 14, 14), (32, 64, 28, 28)]
SMALL += [(128, 64, 32, 32), (64, 512, 7, 7)]
SMALL_ROWS = [(32, 128), (512, 256), (4096, 256)]
HALF, BOTH = ["bfloat16"], ["bfloat16", "float32"]
SUITES = {
    "headline": [
        *cases(["batch_norm"], HEADLINE, HALF),
        *cases(["batch_norm"], HEADLINE[:1], ["float32"]),
        *cases(BATCH_NORMS[1:], FUSED, HALF),
        *cases(["layer_norm"], [*WIDTHS, VIT, (512, 8192)], BOTH),
        *cases(["add_layer_norm", "add_bias_layer_norm"], [VIT, (8192, 4096)], HALF),
    ],
    "float32-float64": cases(BATCH_NORMS, PLAIN, ["float32", "float64"]),
    "small": [
        *cases(BATCH_NORMS, SMALL, BOTH),
        *cases(["layer_norm", "add_layer_norm"], SMALL_ROWS, BOTH),
    ],
    "families": [
        *cases(["rms_norm"], [(4096, 4096), (4096, 8192), VIT, HEADS], HALF),
        *cases(["add_rms_norm"], [(8192, 4096)], HALF),
        *cases(["rms_norm_gate", "gate_rms_norm"], GATED, HALF),
        *cases(["adaptive_layer_norm"], ADAPTIVE, HALF),
        *cases(["group_norm", "group_norm_silu"], UNET, HALF),
        *cases(["instance_norm"], [VOLUME], HALF),
    ],
    # In float16 and channels_last, eager runs cuDNN's BatchNorm.
    "cudnn": [
        *cases(["batch_norm"], HEADLINE, ["float16"]),
        *cases(BATCH_NORMS[1:], FUSED, ["float16"]),
    ],
}
OPTIONS = {
    "--suite": {"choices": SUITES, "default": "headline"},
    "--only": {"default": "", "help": "cases whose name has this text"},
    "--provider": {
        "action": "append",
        "help": "such as eager; may be repeated; default: all",
    },
}


def measure(a: Namespace) -> Iterator[Rows]:
    """The rows of each case of a suite."""
    found = [case for case in SUITES[a.suite] if a.only in str(case)]
    if not found:
        raise SystemExit(f"no case of suite {a.suite} has {a.only!r} in its name")
    for case in found:
        providers = PROVIDERS | rivals.of(case.op)
        chosen = {
            name: providers[name] for name in a.provider or providers if name in providers
        }
        yield measure_op(case, a.device, providers=chosen)


main = partial(script.main, __doc__, measure, OPTIONS)

if __name__ == "__main__":
    main()
