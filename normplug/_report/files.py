"""Files that a reader finds whole: the old one or the new one, whatever happens in between."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file beside `path`, which takes its place after the block.

    The directory is made if it is absent. If the block raises, the temporary file is removed and
    `path` stays as it was.

    Args:
        path: the file to replace or to make.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Replace `path` by a file of this content; text is written as UTF-8, its newlines as they are.

    Args:
        path: the file to replace or to make; its directory is made if it is absent.
        content: all of it.
    """
    with replace_file(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
