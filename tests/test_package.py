"""The package as a whole: what importing it costs, and which way its rooms' doors open."""

import ast
import subprocess
import sys
from pathlib import Path

import normplug

ROOT = Path(normplug.__file__).parent
# A room may import those before it and itself.
FLOORS = [
    {"_hooks", "modes", "reference", "_checks", "_guards", "_variance_log"},
    {"_kernels"},
    {"_ops"},
    {"functional"},
    {"_sync"},
    {"modules"},
    {"_convert"},
    {"adapters"},
    {"plan"},
    {"_record"},
    {"_fusion"},
    {"_trace"},
    {"_sites"},
    {"fuse"},
    {"swap"},
    {"check"},
    {"lightning"},
    {"compare"},
    {"experiment"},
    {"bench"},
    {"zoo"},
]


def rooms_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("normplug"):
            inside = node.module.split(".")[1:]
            names = inside[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("normplug.")]
        yield from names


def test_imports_point_one_way():
    height = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in height, f"{path} is in no floor"
        for other in rooms_imported(path):
            if other in height and other != room:
                assert height[other] < height[room], f"{room} imports {other}"


def test_importing_needs_torch_only_and_touches_no_device():
    code = (
        "import sys, torch; before = set(sys.modules); import normplug; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "assert not new & {'triton', 'lightning', 'hydra', 'matplotlib', 'torchvision', 'timm', "
        "'transformers'}, new; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_public_surface_is_what_the_design_names():
    assert set(normplug.__all__) == {
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "LayerNorm",
        "NormMode",
        "SyncBatchNorm",
        "check",
        "functional",
        "fuse",
        "fusions",
        "plan",
        "set_mode",
        "swap",
        "swapped",
        "target_variance",
        "unfuse",
        "unswap",
    }
    assert normplug.functional.__all__ == [
        "add_layer_norm",
        "batch_norm",
        "channel_stats",
        "layer_norm",
    ]


def test_the_environment_sets_the_default_backend():
    code = "import normplug; normplug.LayerNorm(4)"
    command = [sys.executable, "-c", code]
    good = subprocess.run(
        command, env={"NORMPLUG_BACKEND": "torch"}, capture_output=True, text=True
    )
    assert good.returncode == 0, good.stderr
    bad = subprocess.run(command, env={"NORMPLUG_BACKEND": "gpu"}, capture_output=True, text=True)
    assert "NORMPLUG_BACKEND must be one of 'auto', 'triton', 'torch'; got 'gpu'" in bad.stderr
