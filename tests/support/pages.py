"""Run the Python blocks of a page of the documentation, as a reader would.

A block with a title is a program: it runs by itself. Other blocks go on from the blocks before
them, and from `NAMES`: what a user already has, such as a model and a batch. A comment above a
block may say what is special about it, as `<!-- test: needs cuda -->`. Several marks are separated
by semicolons:

- `needs cuda`, `needs no cuda`, `needs torch 2.14 or cuda`: it runs there only.
- `under torchrun`: it runs as the only process that torchrun started.
- `raises NAME`: it ends with this error.
- `with a new model`: not with the one that the blocks before it have changed.
- anything else says why it is never run.
"""

import doctest
import json
import os
import re
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn

BLOCK = re.compile(
    r"^(?:<!-- test: (?P<marks>.*?) -->\n)?"
    r'```python(?: title="(?P<title>\S+)")?\n(?P<code>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
TORCHRUN = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "RANK": "0",
    "WORLD_SIZE": "1",
}
TORCHRUN["LOCAL_RANK"] = "0"
CUDA = torch.cuda.is_available()
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
RUNS_WHERE = {
    "needs cuda": CUDA,
    "needs no cuda": not CUDA,
    "needs torch 2.8": VERSION >= (2, 8),
    "needs torch 2.14 or cuda": CUDA or VERSION >= (2, 14),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(torch.relu(self.norm2(self.norm1(x))))


class Model(nn.Module):
    """Norms with what `fuse` puts next to them, and a head."""

    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x):
        x = self.layer1(x).mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm2(self.norm1(x)))


def images():
    return torch.randn(8, 3, 8, 8)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(images()).square().mean().backward()
    optimizer.step()


def trained_model():
    model = Model()
    for _ in range(3):
        train(model)
    return model


def imported(module, name=None):
    found = __import__(module, fromlist=["_"])
    return found if name is None else getattr(found, name)


def mesh():
    device = "cuda" if CUDA else "cpu"
    return imported("torch.distributed.device_mesh", "init_device_mesh")(device, (1,))


def arguments():
    make = imported("transformers", "TrainingArguments")
    return make("out", report_to=[], use_cpu=not CUDA)


# What a user has before the first line of a page, by name; nothing of normplug.
NAMES = {
    "torch": lambda: torch,
    "model": Model,
    "trained": trained_model,
    "pretrained": trained_model,
    "batch": images,
    "train": lambda: train,
    "layer": lambda: nn.LayerNorm(8).eval(),
    "x": lambda: torch.randn(4, 8),
    "args": arguments,
    "data": lambda: [{"x": row} for row in images()],
    "lightning": lambda: imported("lightning"),
    "transformers": lambda: imported("transformers"),
    "mesh": mesh,
}


def blocks_of(page):
    """The marks, the title and the code of each block, and the line where it starts."""
    text = Path(page).read_text()
    for found in BLOCK.finditer(text):
        marks = [mark for mark in (found["marks"] or "").split("; ") if mark]
        yield (
            marks,
            found["title"],
            found["code"],
            text[: found.start("code")].count("\n"),
        )


def run(page):
    """Print a line of JSON for each block: where it is, what happened, and more about that."""
    torch.manual_seed(0)
    warnings.filterwarnings("error", "normplug", UserWarning)
    names = {"__name__": "__main__"}
    for marks, title, code, line in blocks_of(page):
        why_not = reason_to_skip(marks)
        if why_not:
            outcome, more = "skipped", why_not
        else:
            outcome, more = _outcome(marks, title, "\n" * line + code, page, names)
        sys.stdout.flush()
        print(json.dumps([f"{Path(page).name}:{line}", outcome, more]), flush=True)


def reason_to_skip(marks):
    """Why a block does not run here; None if it runs."""
    for mark in marks:
        says_how = mark in ("under torchrun", "with a new model") or mark.startswith(
            "raises "
        )
        if not says_how and not RUNS_WHERE.get(mark, False):
            return mark
    return None


def _outcome(marks, title, code, page, names):
    """Run a block; return what happened, and more about that."""
    if "under torchrun" in marks:
        os.environ.update(TORCHRUN)
    if "with a new model" in marks:
        names.pop("model", None)
    scope = {"__name__": "__main__"} if title else names
    try:
        if not title:
            _supply(code, names)
        _execute(code, page, scope)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("normplug"):
            return "failed", traceback.format_exc()
        return "missing", str(missing)
    except Exception as error:
        if f"raises {type(error).__name__}" in marks:
            return "ran", ""
        return "failed", traceback.format_exc()
    names.update(scope)
    if any(mark.startswith("raises ") for mark in marks):
        return "failed", f"it should have ended otherwise: {marks}"
    return "ran", ""


def _supply(code, names):
    """Make those of `NAMES` that a block uses and that no earlier block has made."""
    for name, make in NAMES.items():
        if name not in names and re.search(rf"\b{name}\b", code):
            names[name] = make()


def _execute(code, page, scope):
    if ">>> " not in code:
        exec(compile(code, page, "exec"), scope)
        return
    test = doctest.DocTestParser().get_doctest(code, scope, "block", page, 0)
    printed = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    if runner.run(test, out=printed.append, clear_globs=False).failed:
        raise AssertionError("".join(printed))
