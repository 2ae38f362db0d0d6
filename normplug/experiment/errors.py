"""One-sentence errors for the user of train.py, in place of tracebacks."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException
from pydantic import ValidationError

WHO = "normplug.experiment"
NAME = r"^[^/\\.][^/\\]{0,99}$"  # the pattern of a study or a tag
PLACE = "hydra.run.dir=DIR, or study=NAME for a sweep"
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # full, over a limit, read-only


class UserError(CompactHydraException):
    """A mistake in the command: the message is one sentence, and no traceback follows."""


def user_sentence(error: BaseException) -> str | None:
    """Return the message for the user; None if the error is a bug, which needs its traceback."""
    for cause in _causes(error):
        # A worker of a DataLoader sends its traceback, which ends in the message.
        sentence = str(cause).rpartition("\nValueError: ")[2].strip()
        if sentence.startswith("normplug"):
            return sentence
        if isinstance(cause, OSError) and cause.errno in DISK:
            return unwritable(Path(cause.filename or HydraConfig.get().runtime.output_dir), cause)
    if isinstance(error, InstantiationException):
        return _building_sentence(error)
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.filename.endswith("checkpoint_connector.py") for frame in frames):
        return (
            f"{WHO}: the checkpoint cannot be restored ({type(error).__name__}: {one_line(error)})."
            " It is damaged, or was not written by train.py. Give another ckpt_path."
        )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the errors that Python's traceback shows."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _building_sentence(error: InstantiationException) -> str:
    """Return the message for an object that could not be built, with the overrides of its group."""
    key = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
    where = key[1] if key else "an object of the configuration"
    if isinstance(error.__cause__, ValidationError):
        return broken_rule(where, error.__cause__)
    group = where.split(".")[0]
    overrides = HydraConfig.get().overrides.task
    given = [text for text in overrides if re.match(rf"[+~]*{re.escape(group)}[.=]", text)]
    got = f"; the command gives {', '.join(given)}" if given else ""
    why = one_line(error.__cause__ or error)
    return f"{WHO}: {where} cannot be built: {why}{got}. Change the keys of {group}."


def broken_rule(key: str, error: ValidationError, *value: Any) -> str:
    """Return the message for a value that pydantic refuses; by default, an argument of `key`."""
    errors = error.errors()
    if errors[0]["type"].startswith(("unexpected", "missing", "extra")):
        what = "; ".join(f"{e['msg'].lower()}: {'.'.join(map(str, e['loc']))}" for e in errors)
        sizes = {e["loc"][-1] for e in errors} & {"num_classes", "vocabulary"}
        pair = " Choose a model and data that match, such as model=gpt_tiny data=text."
        return f"{WHO}: {key}: {what}.{pair if sizes else ''}"
    if not value:
        key, value = ".".join(map(str, [key, *errors[0]["loc"]])), (errors[0]["input"],)
    kinds = (re.sub(r"^\w+ should ", "", e["msg"]) for e in errors)
    rules = " or ".join(dict.fromkeys(kinds)).replace(" or be ", " or ")
    in_words = "be a name: at most 100 characters, without slashes, not beginning with a dot"
    rules = rules.replace(f"match pattern '{NAME}'", in_words)
    return f"{WHO}: {key} should {rules}; got {shown(value[0])}."


def shown(value: Any) -> str:
    """Format a value as a user would type it, and only the start of a long one."""
    words = {"None": "null", "True": "true", "False": "false"}
    text = words.get(repr(value), repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


def unwritable(path: Path, error: OSError) -> str:
    """Return the message for a directory or a file that cannot be written."""
    return (
        f"{WHO}: {path} cannot be written: {error.strerror or error}. Free up space or make it "
        f"writable, or choose another directory: {PLACE}."
    )


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, without its full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:500].rstrip(".!")
