"""Private names of torch: one file has them all, and each may be missing."""

import ast
import importlib.metadata
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils._python_dispatch import BaseTorchDispatchMode

import normplug
from forks import forked
from normplug import _torch

ROOT = Path(normplug.__file__).parent
NAMES = re.findall(r'_private\(\s*"([\w.]+)"', Path(_torch.__file__).read_text())
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


# The names are hidden from `_torch` only, since torch itself uses most of them. Each case runs in a
# fork of a process that has imported torch, since that import takes longer than the rest.
TRAIN_WITHOUT = """
import gc, importlib.util, json, os, sys, tempfile, traceback, pytest, torch

def train_without(names, backend):
    spec = importlib.util.spec_from_file_location("normplug._torch", sys.argv[0])
    sys.modules["normplug._torch"] = without = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delattr(f"torch.{name}", raising=False)
        spec.loader.exec_module(without)
    import normplug
    from normplug import _torch
    assert _torch is without
    model = normplug.fuse(normplug.swap(make_model(), backend=backend))
    losses = train(model)
    assert normplug.check(model)
    return losses

def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1)
    )

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.arange(32.0).view(4, 8).sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

train(make_model())  # what torch imports late is imported once
gc.freeze()
sys.dont_write_bytecode = False
with tempfile.TemporaryDirectory() as sys.pycache_prefix:  # and normplug is compiled once
    for case in json.loads(sys.argv[1]):
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps(train_without(*case)), flush=True)
            except BaseException:
                print(json.dumps(traceback.format_exc()), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
"""


def kernels_run():
    try:
        found = [importlib.metadata.version(name) for name in ("triton", "numpy")]
    except importlib.metadata.PackageNotFoundError:
        return False
    versions = [tuple(map(int, version.split(".")[:2])) for version in found]
    return versions[0] >= (3, 7) or versions[1] < (2, 4)  # or NumPy is too new


@pytest.fixture(scope="module")
def losses():
    """A model's losses for each case: the hidden names, and the backend."""
    cases = [("", "auto"), *((name, "auto") for name in NAMES)]
    if kernels_run():
        cases += [("", "triton"), (" ".join(NAMES), "triton")]
    hidden = json.dumps([(names.split(), backend) for names, backend in cases])
    ran = forked(TRAIN_WITHOUT, _torch.__file__, hidden, environment={"TRITON_INTERPRET": "1"})
    return dict(zip(cases, map(json.loads, ran.stdout.splitlines()), strict=True))


def test_a_model_trains_without_any_single_name(losses):
    assert len(NAMES) > 15
    expected = losses["", "auto"]
    assert [type(loss) for loss in expected] == [float, float]
    assert {name: losses[name, "auto"] for name in NAMES} == dict.fromkeys(NAMES, expected)


def test_the_kernels_train_a_model_without_all_of_the_names(losses):
    if not kernels_run():
        pytest.skip("needs Triton's interpreter")
    expected = losses["", "triton"]
    assert [type(loss) for loss in expected] == [float, float]
    assert losses[" ".join(NAMES), "triton"] == expected


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


# Queries of torch's state, and their fallbacks, where both can be called without a GPU.
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize(
    ("ask", "question"),
    [
        (under_grad, _torch.interposed),
        (under_grad, _torch.transforms_active),
        (under_grad, _torch._transforms_active),
        (under_trace, _torch.interposed),
        (under_trace, _torch.is_tracing),
        (under_trace, lambda: _torch._is_tracing_or_none() is not None),
        (under_forward_ad, _torch.interposed),
        (under_forward_ad, _torch.in_forward_ad),
        (under_forward_ad, lambda: _torch._ForwardAD()._current_level >= 0),
        (under(BaseTorchDispatchMode), _torch.interposed),
        (without_hooks, lambda: not _torch.saved_tensors_hooks_are_allowed()),
        (without_hooks, lambda: not _torch._saved_tensors_hooks_are_allowed()),
    ],
)
def test_a_query_is_true_only_inside(ask, question):
    assert (question(), ask(question), question()) == (False, True, False)


def test_the_fallback_makes_a_dead_wrapper_plain():
    left = []
    t = torch.ones(3, requires_grad=True)
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(t)
    for plain in (_torch.unwrap_if_dead, _torch._plain):
        assert plain(left[0]).data_ptr() == t.data_ptr()
        assert plain(left[0]).requires_grad


def test_the_fallback_finds_the_leaves_of_an_output():
    tree = {"a": [1, (2, 3)], "b": {"c": None}, "d": torch.Size([4])}
    assert _torch._tree_leaves(tree) == _torch.tree_leaves(tree)


def test_the_base_classes_are_torchs():
    assert _torch.BatchNormBase is nn.modules.batchnorm._BatchNorm
    assert _torch.LazyNormBase is nn.modules.batchnorm._LazyNormBase
    assert _torch.NormBase is nn.modules.batchnorm._NormBase


@pytest.mark.gpu
def test_the_fallbacks_give_the_same_gpu_and_stream():
    assert _torch.current_device_index() == torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream()):
        for index in range(torch.cuda.device_count()):
            assert _torch.current_raw_stream(index) == _torch._current_raw_stream(index)
    _torch._gpu_sleep(100_000)
    torch.cuda.synchronize()
