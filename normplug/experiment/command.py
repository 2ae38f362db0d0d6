"""Rewrite the command line of train.py for Hydra, and quote it for the user to repeat."""

from __future__ import annotations

import functools
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

PLAIN = re.compile(r"[\w./-]+")  # a value that Hydra parses without quotes


def accept_null_groups(configs: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a Hydra application so that its command line accepts `GROUP=null`."""

    def decorate(application: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(application)
        def wrapper(*arguments: Any) -> Any:
            sys.argv[1:] = groups_off(sys.argv[1:], configs)
            return application(*arguments)

        return wrapper

    return decorate


def groups_off(arguments: Sequence[str], configs: str) -> list[str]:
    """Rewrite `GROUP=null`, which Hydra refuses with a traceback, as `GROUP=[]`.

    The groups are the subdirectories of `configs`.
    """
    groups = "|".join(re.escape(path.name) for path in Path(configs).iterdir() if path.is_dir())
    override = re.compile(rf"(?:{groups})=")
    null = re.compile(r"(?<=[=,])null(?=,|$)")
    return [null.sub("[]", text) if override.match(text) else text for text in arguments]


def is_sweep() -> bool:
    """Whether this run is part of a sweep (`-m`)."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def as_typed(checkpoint: Path | None = None) -> str:
    """Return this command as a user would type it, with `ckpt_path=checkpoint` if that is given."""
    arguments = list(sys.argv)
    if checkpoint is not None:
        value = str(checkpoint)
        if not PLAIN.fullmatch(value):
            value = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        arguments = [a for a in arguments if not a.startswith("ckpt_path=")]
        arguments.append(f"ckpt_path={value}")
    return shlex.join(["python", *arguments])
