"""Private names of torch: one file has them all."""

import ast
import re
from pathlib import Path

import normplug

ROOT = Path(normplug.__file__).parent
LOOK_UPS = ("getattr", "hasattr", "setattr", "delattr")


def private_names(source):
    """Paths under torch, of which a part is private, that a file imports, reads or looks up."""
    nodes, paths, read = [*ast.walk(ast.parse(source))], {}, []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            paths |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            paths |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.Attribute):
            read.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in LOOK_UPS:
            read.append(f"{ast.unparse(node.args[0])}.{ast.unparse(node.args[1])[1:-1]}")
    parts = (name.partition(".") for name in read)
    found = [paths.get(first, first) + dot + rest for first, dot, rest in parts]
    private = re.compile(r"torch(\.\w+)*\._(?!_)\w+")
    return sorted({path for path in (*paths.values(), *found) if private.match(path)})


def test_one_file_has_every_private_name_of_torch():
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in ROOT.rglob("*.py")
        if path.name != "_torch.py" and (names := private_names(path.read_text()))
    }
    assert found == {}
