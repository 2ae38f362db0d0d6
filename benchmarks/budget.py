"""Count what a change costs: Python calls of normplug in a step, and tokens of its code.

    python benchmarks/budget.py            # the counts, and the limits in benchmarks/budget.json
    python benchmarks/budget.py --write    # the counts become the limits: a change that needs more

Both are counts, so they are equal on every machine. Times are for `gate.py`, on a GPU.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import normplug
from normplug import native

PACKAGE = Path(normplug.__file__).parent
LIMITS = Path(__file__).with_suffix(".json")
MORE = 0.02  # of a limit: what a change may add without a new limit
WARM_UPS = 2
TOKENS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
# A comprehension is a call in Python 3.11 and none in 3.12.
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")


class Block(nn.Module):
    """A residual block of a transformer, without attention."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1 = norm(8)
        self.norm2 = norm(8)
        self.linear1 = nn.Linear(8, 8)
        self.linear2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Two residual additions, each before a norm."""
        x = x + self.linear1(self.norm1(x))
        return x + self.linear2(self.norm2(x))


def images(norm: Callable[[int], nn.Module]) -> tuple[nn.Module, Tensor]:
    """Four convolutions, each with a norm and ReLU; and a batch."""
    layers = [nn.Sequential(nn.Conv2d(4, 4, 1), norm(4), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(2, 4, 3, 3)


def rows(norm: Callable[[int], nn.Module]) -> tuple[nn.Module, Tensor]:
    """Four residual blocks, and a batch."""
    return nn.Sequential(*(Block(norm) for _ in range(4))), torch.randn(2, 3, 8)


CASES = {
    "BatchNorm2d": lambda: images(nn.BatchNorm2d),
    "GroupNorm": lambda: images(lambda channels: nn.GroupNorm(2, channels)),
    "LayerNorm": lambda: rows(nn.LayerNorm),
    "RMSNorm": lambda: rows(nn.RMSNorm),
}


def calls(model: nn.Module, batch: Tensor) -> int:
    """The Python functions of normplug that a fused training step calls, on the CPU."""
    model = normplug.fuse(normplug.swap(model.train()))
    found = 0

    def step() -> None:
        model(batch).sum().backward()

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        code = frame.f_code
        is_ours = code.co_filename.startswith((str(PACKAGE), "<normplug"))
        found += event == "call" and is_ours and code.co_name not in COMPREHENSIONS

    with native.python_way():
        for _ in range(WARM_UPS):
            step()
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(None)
    return found


def tokens() -> dict[str, int]:
    """The names, operators and numbers in the code of each part of the package."""
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        read = io.StringIO(path.read_text(encoding="utf-8")).readline
        found[part] += sum(each.type in TOKENS for each in tokenize.generate_tokens(read))
    return dict(sorted(found.items()))


def counts() -> dict[str, int]:
    """Every count by its name."""
    found = {f"calls, {name}": calls(*make()) for name, make in CASES.items()}
    found["tokens"] = sum(tokens().values())
    return found


def over(found: dict[str, int], limits: dict[str, int]) -> list[str]:
    """A sentence for each count that is above its limit."""
    return [
        f"{name}: {count}, which is {count / limits[name] - 1:.1%} above {limits[name]}"
        for name, count in found.items()
        if count > limits[name] * (1 + MORE)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="the counts become the limits"
    )
    a = parser.parse_args(argv)
    found = counts()
    if a.write:
        LIMITS.write_text(json.dumps(found, indent=1) + "\n")
    limits = json.loads(LIMITS.read_text())
    for name, count in found.items():
        print(f"{name:20} {count:8,}   limit {limits[name]:8,}")
    for part, count in tokens().items():
        print(f"  {part:18} {count:8,}")
    too_many = over(found, limits)
    if too_many:
        sys.exit(
            "\n".join([*too_many, "If the change is worth it: --write, and say why."])
        )


if __name__ == "__main__":
    main()
