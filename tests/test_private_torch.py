"""Private names of torch: one file has them all."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils._python_dispatch import BaseTorchDispatchMode

import normplug
from normplug import _torch

ROOT = Path(normplug.__file__).parent
LOOK_UPS = ("getattr", "hasattr", "setattr", "delattr")


def imported_names(tree):
    """Yield each name that a file imports, with its path (None for `import torch.nn`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.asname and alias.name


def private_names(source):
    """Paths under torch, of which a part is private, that a file imports, reads or looks up."""
    tree = ast.parse(source)
    paths = {name: path or name for name, path in imported_names(tree)}
    found = [path for path in paths.values() if path]

    def path_of(node):
        if isinstance(node, ast.Name):
            return paths.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = path_of(node.value)
            return owner and f"{owner}.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in LOOK_UPS:
            owner = path_of(node.args[0])
            return owner and f"{owner}.{ast.unparse(node.args[1])[1:-1]}"
        return ""

    found += [path_of(node) for node in ast.walk(tree)]
    private = re.compile(r"torch(\.\w+)*\._(?!_)\w+")
    return sorted({path for path in found if private.match(path)})


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("import torch\nx = torch._C._a()", "torch._C._a"),
        ("from torch import nn\nnn.modules.b._B", "torch.nn.modules.b._B"),
        ("from torch.utils._p import leaves", "torch.utils._p.leaves"),
        ("import torch.nn.modules.module as m\nm._hooks", "torch.nn.modules.module._hooks"),
        ("import torch\ngetattr(torch.compiler, '_flag', 0)", "torch.compiler._flag"),
    ],
)
def test_private_names_are_found(source, path):
    assert path in private_names(source)


@pytest.mark.parametrize("source", ["module._parameters", "import torch\ntorch.__version__"])
def test_attributes_of_objects_and_dunder_names_are_not_private(source):
    assert private_names(source) == []


def test_one_file_has_every_private_name_of_torch():
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in ROOT.rglob("*.py")
        if path.name != "_torch.py" and (names := private_names(path.read_text()))
    }
    assert found == {}


def under_grad(question):
    answers = []
    torch.func.grad(lambda x: (answers.append(question()), x.sum())[1])(torch.ones(2))
    return answers[0]


def under_trace(question):
    answers = []
    torch.jit.trace(lambda x: (answers.append(question()), x + 1)[1], torch.ones(2))
    return answers[0]


def under(block):
    def ask(question):
        with block():
            return question()

    return ask


under_forward_ad = under(forward_ad.dual_level)
without_hooks = under(lambda: disable_saved_tensors_hooks("not now"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize(
    ("ask", "question"),
    [
        (under_grad, _torch.interposed),
        (under_grad, _torch.transforms_active),
        (under_trace, _torch.interposed),
        (under_trace, _torch.is_tracing),
        (under_forward_ad, _torch.interposed),
        (under_forward_ad, _torch.in_forward_ad),
        (under(BaseTorchDispatchMode), _torch.interposed),
        (without_hooks, lambda: not _torch.saved_tensors_hooks_are_allowed()),
    ],
)
def test_a_query_is_true_only_inside(ask, question):
    assert (question(), ask(question), question()) == (False, True, False)
