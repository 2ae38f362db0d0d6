"""Optional packages: an error that names the extra to install if one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingPackage(ModuleNotFoundError):
    """A package of an extra is not installed; the message says how to install it."""


@contextmanager
def needs(caller: str, extra: str, raises: type[BaseException] = MissingPackage) -> Iterator[None]:
    """Name the extra if a package imported inside the block is missing.

    An error about a missing module of normplug itself is a defect and is raised as it is.

    Args:
        caller: what needs the package; the message begins with it.
        extra: the extra of normplug that brings it.
        raises: the error to raise; `SystemExit` ends a command line with the message and status 1.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "normplug":
            raise
        message = f'{caller} needs {error.name}: pip install "normplug[{extra}]"'
        if issubclass(raises, ModuleNotFoundError):
            raise raises(message, name=error.name) from None
        raise raises(message) from None
