"""Python runs this file when a program of `python -m normplug run`, or a child of it, starts.

It imports neither torch nor normplug: it waits until the program has imported torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))


class AfterTorch:
    """An entry of `sys.meta_path` that starts normplug when torch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of torch, whose loader starts normplug when it has run the module."""
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec: Any = next(filter(None, specs), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def execute_and_start(module: Any) -> None:
                execute(module)
                start()

            spec.loader.exec_module = execute_and_start
        return spec


after_torch: Any = AfterTorch()


def start() -> None:
    """Start normplug in this process; say why if that fails."""
    if after_torch not in sys.meta_path:
        return
    sys.meta_path.remove(after_torch)
    is_elsewhere = CHECKOUT not in sys.path
    if is_elsewhere:
        sys.path.append(CHECKOUT)  # last: it hides nothing of the program
    try:
        importlib.import_module("normplug._run.program").start()
    except Exception as error:
        print(f"normplug run: disabled in this process: {error}", file=sys.stderr)
    finally:
        if is_elsewhere:
            sys.path.remove(CHECKOUT)


def step_aside() -> None:
    """Give the program the `sys.path` and the `sitecustomize` that it has without this file."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    sys.modules.setdefault("sitecustomize", this)  # type: ignore[arg-type]


if os.environ.get("NORMPLUG_RUN", "0") != "0":
    sys.meta_path.insert(0, after_torch)
step_aside()
