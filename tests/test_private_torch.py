"""Private names of torch: one file has them all."""

import ast
import re
from pathlib import Path

import normplug

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


def test_one_file_has_every_private_name_of_torch():
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in ROOT.rglob("*.py")
        if path.name != "_torch.py" and (names := private_names(path.read_text()))
    }
    assert found == {}
