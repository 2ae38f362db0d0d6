"""Atomic writes: a reader finds the old file or the new one, never a part of either."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file beside `path`, which takes its place after the block.

    Missing directories are created. If the block raises, the temporary file is removed and `path`
    is left as it was.

    Args:
        path: the file to replace or create.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` atomically; text becomes UTF-8, without newline translation.

    Args:
        path: the file to replace or create; missing directories are created.
        content: the whole content.
    """
    with replace_file(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
