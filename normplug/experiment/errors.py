"""One-sentence errors for the user of train.py, in place of tracebacks."""

from __future__ import annotations

import difflib
import errno
import re
import traceback
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException, InstantiationException
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

WHO = "normplug.experiment"
NAME = r"^[^/\\.][^/\\]{0,99}$"  # the pattern of a study or a tag
PLACE = "hydra.run.dir=DIR, or study=NAME for a sweep"
SEE_HELP = "`python train.py --help` lists the keys."
UNWRITABLE = {  # full, over a limit, no permission, or no place for a directory
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES,
    errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR,
}  # fmt: skip


class UserError(CompactHydraException):
    """A mistake in the command: the message is one sentence, and no traceback follows."""


def user_sentence(error: BaseException, checkpoint: Path | None = None) -> str | None:
    """Return the message for the user; None if the error is a bug, which needs its traceback."""
    cause: BaseException | None = error
    while cause is not None:  # the errors that Python's traceback shows
        # A worker of a DataLoader sends its traceback, which ends in the message.
        sentence = str(cause).rpartition("\nValueError: ")[2].strip()
        if sentence.startswith("normplug"):
            return sentence
        built = isinstance(error, InstantiationException)
        if isinstance(cause, OSError) and cause.errno in UNWRITABLE and not built:
            path = Path(cause.filename or "a file of the run").absolute()
            return (
                f"{WHO}: {path} cannot be written: {cause.strerror}. Free up space or make it "
                f"writable, or choose another directory: {PLACE}."
            )
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if isinstance(error, InstantiationException):
        return _building_sentence(error)
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        text = re.sub(r" full_key: (\S+)( object_type=\w+)?", r" (\1)", one_line(error))
        if unknown := re.match(r"Could not override '([\w.]+)'", text):
            from normplug.experiment.config import Config  # which imports this file

            near = difflib.get_close_matches(unknown[1], Config.__annotations__, 1, cutoff=0.7)
            advice = f"Did you mean {near[0]}?" if near else SEE_HELP
            return f"{WHO}: {unknown[1]} is not a key of the configuration. {advice}"
        return f"{WHO}: {text}. {SEE_HELP}"
    frames = traceback.extract_tb(error.__traceback__)
    if checkpoint and any(f.filename.endswith("checkpoint_connector.py") for f in frames):
        why = one_line(error).split(". ")[0][:200]  # what follows is advice for another program
        return (
            f"{WHO}: the checkpoint {checkpoint} cannot be restored ({type(error).__name__}: "
            f"{why}). Give a whole checkpoint of the same run, or change this run to match it."
        )
    return None


def _building_sentence(error: InstantiationException) -> str:
    """Return the message for an object that could not be built, with the overrides of its group."""
    key = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
    where = key[1] if key else "an object of the configuration"
    if isinstance(error.__cause__, ValidationError):
        return broken_rule(error.__cause__, where)
    group = where.split(".")[0]
    overrides = HydraConfig.get().overrides.task
    given = ", ".join(text for text in overrides if text.lstrip("+~").startswith(group))
    why = one_line(error.__cause__ or error)
    return f"{WHO}: {where} cannot be built: {why}. Change the keys of {group} ({given})."


def broken_rule(error: ValidationError, group: str = "") -> str:
    """Return the message for the first value that pydantic refuses; `group` has the value."""
    errors = error.errors()
    first = errors[0]
    if first["type"].startswith(("unexpected", "missing", "extra")):
        what = "; ".join(f"{e['msg'].lower()}: {'.'.join(map(str, e['loc']))}" for e in errors)
        sizes = {e["loc"][-1] for e in errors} & {"num_classes", "vocabulary"}
        pair = "Choose a model and data that match, such as model=gpt_tiny data=text."
        return f"{WHO}: {group or 'the configuration'}: {what}. {pair if sizes else SEE_HELP}"
    # Where a value may have several types, one part is a type, such as dict[str,int].
    parts = [str(p) for p in (group, *first["loc"]) if re.fullmatch(r"[\w.]+", str(p))]
    rule = re.sub(r"^\w+ should ", "", first["msg"])
    in_words = "be a name: at most 100 characters, without slashes, not beginning with a dot"
    rule = rule.replace(f"match pattern '{NAME}'", in_words)
    words = {"None": "null", "True": "true", "False": "false"}  # as a user types them
    text = repr(first["input"])[:200]
    return f"{WHO}: {'.'.join(parts)} should {rule}; got {words.get(text, text)}."


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, without its full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:500].rstrip(".!")
