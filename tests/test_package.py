"""The package as a whole: what importing it costs, and which way its imports point."""

import ast
import graphlib
from importlib.util import find_spec
from pathlib import Path

import pytest

import normplug
from programs import program

ROOT = Path(normplug.__file__).parent
CHECKOUT = ROOT.parent
TRAIN = ["hydra", "lightning", "matplotlib", "numpy", "pandas"]
TRAIN += ["omegaconf", "pydantic", "scipy", "sklearn", "torchvision"]
# Modules of the standard library that only Unix has.
UNIX_ONLY = {
    "crypt",
    "fcntl",
    "grp",
    "posix",
    "pty",
    "pwd",
    "resource",
    "syslog",
    "termios",
    "tty",
}
# The floors: a package or module may import itself and those of the floors before its own.
LAYERS = [
    {
        "_activations",
        "_choices",
        "_layouts",
        "_files",
        "_measure",
        "_torch",
        "modes",
        "native",
        "reference",
    },
    {"_checks", "_kernels", "_pictures", "_restore"},
    {"_batches", "_ops", "_table", "compare"},
    {"_status", "functional", "modules"},
    {"adapters"},
    {"_convert"},
    {"_fuse", "_swap"},
    {"_tools"},
    {"callbacks", "lightning", "normplug", "transformers"},
    {"_run"},
    {"__main__", "bench"},
    {"experiment"},
]


def nodes_that_run(tree):
    """The nodes of a tree without those that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes_that_run(node)


def parts_imported(path):
    for node in nodes_that_run(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "normplug"
        ):
            inside = node.module.split(".")[1:]
            yield from inside[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [
                alias.name for alias in node.names if alias.name.startswith("normplug")
            ]
            yield from (name.removeprefix("normplug.").split(".")[0] for name in names)


def test_imports_point_one_way():
    level = {part: number for number, parts in enumerate(LAYERS) for part in parts}
    for path in ROOT.rglob("*.py"):
        part = (
            path.relative_to(ROOT)
            .parts[0]
            .removesuffix(".py")
            .replace("__init__", "normplug")
        )
        assert part in level, f"{path} is in no layer"
        for other in parts_imported(path):
            if other in level and other != part:
                assert level[other] < level[part], f"{part} imports {other}"


def test_no_files_import_each_other_in_a_circle():
    files = {
        path.relative_to(CHECKOUT).with_suffix("").as_posix()
        for path in ROOT.rglob("*.py")
    }
    graph = {}
    for file in files:
        graph[file] = set()
        for node in ast.walk(ast.parse((CHECKOUT / f"{file}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("normplug"):
                folder = node.module.replace(".", "/")
                inner = {f"{folder}/{alias.name}" for alias in node.names}
                found = files & (inner | {f"{name}/__init__" for name in inner})
                graph[file] |= found or files & {folder, f"{folder}/__init__"}
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the circle


def test_no_norms_kernels_import_those_of_another():
    norms = {path.parent.name for path in (ROOT / "_kernels").glob("*/__init__.py")}
    assert len(norms) >= 3
    for path in (ROOT / "_kernels").glob("*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(
                "normplug._kernels."
            ):
                assert node.module.split(".")[2] not in norms - {path.parent.name}, path


# A kernel takes every tensor and number by itself; the rest of the package groups them.
MOST_PARAMETERS = {"kernel": 30, "triton.jit": 10, "": 12}


def functions_of(path):
    """Each function of a file, with "kernel", "triton.jit" or ""."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            kinds = decorators & MOST_PARAMETERS.keys()
            yield node, kinds.pop() if kinds else ""


def is_public_signature(path, function):
    """Whether the parameters are those of torch's own function or layer, and normplug's."""
    is_layer = path.parent.name == "modules" and function.name == "__init__"
    return path.name == "functional.py" or is_layer


def test_functions_have_few_parameters():
    for path in ROOT.rglob("*.py"):
        for function, kind in functions_of(path):
            arguments = function.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = len([name for name in named if name.arg not in ("self", "cls")])
            if not is_public_signature(path, function):
                place = (
                    f"{path}:{function.lineno}: {function.name} has {count} parameters"
                )
                assert count <= MOST_PARAMETERS[kind], place


def test_importing_needs_torch_only_and_swapping_touches_no_device():
    code = """
import sys, torch, warnings
warnings.simplefilter("error")
before = set(sys.modules)
import normplug
new = {name.split(".")[0] for name in set(sys.modules) - before}
tools = {"triton", "lightning", "hydra", "matplotlib", "torchvision", "timm", "transformers"}
assert not new & tools, new
late = {"_fuse.fuse", "_kernels", "_tools", "adapters", "lightning", "bench"}
assert not {f"normplug.{part}" for part in late} & set(sys.modules)
assert normplug.fuse.__name__ == "fuse" and "unfuse" in dir(normplug)
modules = {"bench", "callbacks", "compare", "lightning", "transformers"}
assert modules < set(dir(normplug))
assert not {f"normplug.{name}" for name in modules} & set(sys.modules)
normplug.swap(torch.nn.LayerNorm(4))
assert not torch.cuda.is_initialized()
"""
    done = program(code)
    assert done.returncode == 0, done.stderr


def test_training_imports_no_other_tool():
    pytest.importorskip("torchvision")
    done = program("import sys, train; print([*sys.modules])")
    assert done.returncode == 0, done.stderr
    assert "normplug.experiment.run" in done.stdout
    for name in ("normplug.bench", "normplug.compare"):
        assert name not in done.stdout


def test_without_triton_every_norm_trains_and_a_call_for_the_kernels_is_refused():
    code = """
import torch, normplug
from torch import nn
norms = nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm(5)
net = nn.Sequential(nn.Conv2d(3, 4, 1), *norms, nn.RMSNorm(5))
normplug.fuse(normplug.swap(net))
x = torch.randn(2, 3, 5, 5)
net(x).sum().backward()
assert len(normplug.check(net, x)) == 5
normplug.RMSNorm(5, backend="triton")(x)
"""
    error = program(code, hidden=["triton"]).stderr.splitlines()[-1]
    expected = (
        "backend='triton', but triton is not installed. Use backend='auto' or 'torch'."
    )
    assert error.endswith(expected), error


def test_the_environment_sets_the_default_backend():
    code = "import normplug; normplug.LayerNorm(4)"
    good, bad = (
        program(code, environment={"NORMPLUG_BACKEND": name}) for name in ("torch", "gpu")
    )
    assert good.returncode == 0, good.stderr
    assert (
        "NORMPLUG_BACKEND must be one of 'auto', 'triton', 'torch'; got 'gpu'"
        in bad.stderr
    )


BENCH = ["-m", "normplug.bench"]


def run_without(packages, kind, *words):
    """Run Python with `packages` hidden from import: `-m module ...` or `path script ...`."""
    if kind == "-m":  # which finds the module while sys.argv[0] is "-m"
        run = "runpy.run_module(name, run_name='__main__', alter_sys=True)"
        code = f"import runpy, sys; name = sys.argv[0]; sys.argv[0] = '-m'; {run}"
    else:
        code = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"
    return program(code, *words, hidden=packages)


@pytest.mark.parametrize(
    ("hidden", "command", "who", "extra"),
    [
        (TRAIN, ["-m", "normplug.compare", "{runs}"], "normplug.compare", "train"),
        (
            ["matplotlib"],
            ["-m", "normplug.compare", "{runs}"],
            "normplug.compare",
            "train",
        ),
        (["matplotlib"], [*BENCH, "plot", "{json}"], "normplug.bench plot", "bench"),
        (["pandas"], [*BENCH, "plot", "{json}"], "normplug.bench plot", "bench"),
        (
            ["pandas"],
            [*BENCH, "sweep", "--device", "cpu"],
            "normplug.bench sweep",
            "bench",
        ),
        (
            ["timm"],
            ["path", "benchmarks/zoo", "--library", "timm"],
            "zoo --library timm",
            "zoo",
        ),
        (["hydra"], ["path", str(CHECKOUT / "train.py")], "train.py", "train"),
    ],
)
def test_a_command_without_its_packages_names_the_extra(
    tmp_path, hidden, command, who, extra
):
    run = tmp_path / "result.json"
    run.write_text(
        '{"model": "m", "data": "d", "arm": "golden", "seed": 0, "status": "failed"}'
    )
    places = {
        "runs": tmp_path,
        "json": CHECKOUT / "docs" / "results" / "layer_norm_h100.json",
    }
    done = run_without(hidden, *(word.format(**places) for word in command))
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{who} needs ")
    assert line.removeprefix(f"{who} needs ").split(":")[0].split(".")[0] in hidden
    assert line.endswith(f': pip install "normplug[{extra}]"')


def test_without_the_packages_of_train_its_modules_say_so_and_bench_is_imported():
    code = "import normplug.bench.__main__; import normplug.experiment"
    last = program(code, hidden=TRAIN).stderr.splitlines()[-1]
    assert "MissingPackage: normplug.experiment needs " in last
    assert last.endswith('pip install "normplug[train]"')


MODULES = {
    "bench": "torch",
    "compare": "pandas",
    "lightning": "lightning",
    "transformers": "transformers",
}


def test_modules_of_extras_are_attributes_of_the_package():
    names = [name for name, package in MODULES.items() if find_spec(package)]
    reads = [f"print(normplug.{name}.__name__)" for name in names]
    done = program("import normplug\n" + "\n".join(reads))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"normplug.{name}" for name in names]


WAYS_TO_IMPORT = """
import normplug
for name in ("lightning", "compare", "transformers"):
    assert not hasattr(normplug, name)
    module = f"normplug.{name}"
    for way in (module, f"from normplug import {name}", f"import {module}"):
        try:
            exec(way)
        except (AttributeError, ImportError) as error:
            print(type(error).__name__, error)
"""


def test_without_its_packages_a_module_is_no_attribute_and_the_error_names_the_extra():
    done = program(WAYS_TO_IMPORT, hidden=[*TRAIN, "transformers"])
    assert done.returncode == 0, done.stderr
    errors = done.stdout.splitlines()
    assert len(errors) == 9
    for name, extra in {
        "lightning": "lightning",
        "compare": "train",
        "transformers": "zoo",
    }.items():
        attribute, _, module = errors[:3]
        assert attribute.startswith(f"AttributeError normplug.{name} needs ")
        assert module.startswith(f"MissingPackage normplug.{name} needs ")
        for error in errors[:3]:
            assert error.endswith(f'pip install "normplug[{extra}]"')
        del errors[:3]


def test_every_library_of_the_zoo_that_is_missing_is_named():
    libraries = ("torchvision", "timm", "transformers", "diffusers")
    done = run_without(libraries, "path", "benchmarks/zoo")
    assert done.returncode == 1
    needs_zoo = 'zoo --library {0} needs {0}: pip install "normplug[zoo]"'
    assert done.stderr.splitlines() == [
        needs_zoo.format(library) for library in libraries
    ]


def test_modules_that_only_unix_has_are_imported_where_they_are_used():
    for path in (*ROOT.rglob("*.py"), CHECKOUT / "train.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not UNIX_ONLY & set(names), f"{path}: {names}"
