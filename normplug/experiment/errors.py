"""One-sentence errors for the user of train.py, in place of tracebacks."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException

WHO = "normplug.experiment"
PLACE = "hydra.run.dir=DIR, or study=NAME for a sweep"
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # full, over the quota, read-only


class UserError(CompactHydraException):
    """A mistake in the command: Hydra prints the message without a traceback."""


def user_sentence(error: BaseException) -> str | None:
    """Return the message for the user; None if the error is a bug, which needs its traceback."""
    cause: BaseException | None = error
    while cause is not None:
        if str(cause).startswith("normplug"):
            return str(cause)
        cause = cause.__cause__
    if isinstance(error, InstantiationException):
        return building_sentence(error, HydraConfig.get().overrides.task)
    if isinstance(error, OSError) and error.errno in DISK:
        return unwritable(Path(error.filename or HydraConfig.get().runtime.output_dir), error)
    return None


def building_sentence(error: InstantiationException, overrides: Iterable[str] = ()) -> str:
    """Return the message for an object of the configuration that `instantiate` could not build.

    It quotes the overrides of the command that belong to the failing group.
    """
    key = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
    where = key[1] if key else "an object of the configuration"
    group = where.split(".")[0]
    given = [text for text in overrides if re.match(rf"[+~]*{re.escape(group)}[.=]", text)]
    got = f"; the command gives {', '.join(given)}" if given else ""
    why = one_line(error.__cause__ or error)
    return f"{WHO}: {where} cannot be built: {why}{got}. Change the keys of {group}."


def unwritable(path: Path, error: OSError) -> str:
    """Return the message for a directory that cannot be written."""
    return (
        f"{WHO}: {path} cannot be written: {error.strerror or error}. Free up space or make it "
        f"writable, or choose another directory: {PLACE}."
    )


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, without its full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".!")
