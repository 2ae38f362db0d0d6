"""Optional packages: one sentence that names the extra to install where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingPackage(ModuleNotFoundError):
    """A package of an extra is not installed; the message says how to install it."""


@contextmanager
def needs(who: str, extra: str, raises: type[BaseException] = MissingPackage) -> Iterator[None]:
    """Name the extra if a package imported inside the block is missing.

    A missing module of normplug itself is a defect, and passes as it is.

    Args:
        who: what needs the package; begins the sentence.
        extra: the extra of normplug that brings it.
        raises: `SystemExit` for a command line, which then ends with the sentence and status 1.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "normplug":
            raise
        sentence = f'{who} needs {error.name}: pip install "normplug[{extra}]"'
        if issubclass(raises, ModuleNotFoundError):
            raise raises(sentence, name=error.name) from None
        raise raises(sentence) from None
