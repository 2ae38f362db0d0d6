"""Explain a mistake in the command in one sentence."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.errors import (
    CompactHydraException,
    HydraException,
    InstantiationException,
    MissingConfigException,
)
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

WHO = "normplug.experiment"
PLACE = "hydra.run.dir=DIR, or study=NAME for a sweep"
SEE_HELP = "`python train.py --help` lists the keys."

# The packed copy of a wheel, or the directory of a checkout.
PLACES = Path(__file__).with_name("configs"), Path(__file__).parents[2] / "configs"
CONFIGS = str(next(filter(Path.is_dir, PLACES)))

# A full disk, or a file over a limit: a write that fails may not name its file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PLUGINS = {  # of Hydra -> the extra that brings it
    "hydra/sweeper/optuna": "optuna",
    "hydra/launcher/joblib": "sweep",
}
YAML_NAMES = {"None": "null", "True": "true", "False": "false"}


class UserError(CompactHydraException):
    """A mistake in the command: the message is one sentence, and no traceback follows."""


def user_sentence(error: BaseException, restoring: Path | None = None) -> str | None:
    """Return the message for the user; None if the error is a bug, which needs its traceback.

    `restoring` is the checkpoint that was being restored when the error was raised.
    """
    shown = list(_shown_with(error))
    for cause in shown:
        message = _message_of(cause)
        if message.startswith("normplug"):
            return message
    if restoring is not None:
        why = one_line(error).split(". ")[0]  # what follows is advice for another program
        return (
            f"{WHO}: the checkpoint {restoring} cannot be restored "
            f"({type(error).__name__}: {why[:200]}). Give a complete checkpoint of the same "
            "run, or change this run to match it."
        )
    if isinstance(error, InstantiationException):
        return _not_built(error)
    for cause in shown:
        if isinstance(cause, OSError) and (cause.filename or cause.errno in FULL):
            name = cause.filename and Path(cause.filename).absolute()
            return (
                f"{WHO}: {name or 'a file of the run'} cannot be read or written: "
                f"{cause.strerror}. Free up space or make it accessible, or choose another "
                f"directory: {PLACE}."
            )
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _not_composed(error)
    if str(error).startswith("Config group override must be"):  # Hydra's ValueError
        return f"{WHO}: only callbacks and logger can be null. {SEE_HELP}"
    return None


def _shown_with(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that Python's traceback shows with it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context


def _message_of(error: BaseException) -> str:
    """Return the message of an error, also of one in a process of a DataLoader."""
    text = str(error)
    if text.startswith("Caught "):
        # Torch adds the traceback; its last line has the message.
        return text.rstrip().splitlines()[-1].partition(": ")[2]
    return text


def _not_built(error: InstantiationException) -> str:
    """Return the message for an object that Hydra could not instantiate."""
    key = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
    where = key[1] if key else "an object of the configuration"
    cause = error.__cause__ or error
    if isinstance(cause, ValidationError):
        return broken_rule(cause, where)
    group = where.split(".")[0]
    return (
        f"{WHO}: {where} cannot be built: {one_line(cause)}. Change the keys of {group}."
    )


def _not_composed(error: BaseException) -> str:
    """Return the message for a command line that Hydra could not compose."""
    text = re.sub(r" full_key: (\S+)( object_type=\w+)?", r" (\1)", one_line(error))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_choice(error.missing_cfg_file, error.options or [])
    unknown = re.match(r"Could not override '([\w.]+)'", text)
    if unknown:
        return (
            f"{WHO}: {unknown[1]} is not a key of the configuration. {_known(unknown[1])}"
        )
    ambiguous = re.match(r"Ambiguous value for argument '([^=]+=(.+?))'", text)
    if ambiguous:
        return (
            f"{WHO}: {ambiguous[1]} has several values. Add -m for one run per value, or write "
            f"a list as [{ambiguous[2]}]."
        )
    word = re.match(r"Error parsing override '(.*?)' missing EQUAL", text)
    if word:
        return f"{WHO}: {word[1]} must be KEY=VALUE, such as mode=golden. {SEE_HELP}"
    return f"{WHO}: {text}. {SEE_HELP}"


def _no_choice(path: str, choices: Sequence[str]) -> str:
    """Return the message for a file that is not in its group of configs/."""
    group, _, choice = path.partition("/")
    if path in PLUGINS:
        return f'{WHO}: {path} needs a plugin: pip install "normplug[{PLUGINS[path]}]"'
    near = difflib.get_close_matches(choice, choices, 2)
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"{WHO}: {group}={choice} is not a choice. {meant}Choose from {', '.join(choices)}."


def _known(name: str) -> str:
    """Return advice on a key that the configuration lacks."""
    keys = known_keys()
    if name in keys:
        return f"Another choice of {name.split('.')[0]} has it. {SEE_HELP}"
    near = [key for key in keys if re.fullmatch(rf"\w+\.{name}", key)]
    near += difflib.get_close_matches(name, keys, 2, cutoff=0.75)
    return f"Did you mean {' or '.join(near)}?" if near else SEE_HELP


def known_keys() -> list[str]:
    """Return the groups of configs/, and every key that one of its files has."""
    root = Path(CONFIGS)
    keys: set[str] = set()
    for path in root.rglob("*.yaml"):
        group = ".".join(path.relative_to(root).parent.parts)
        is_global = not group or "@package _global_" in path.read_text().splitlines()[0]
        content = yaml.safe_load(path.read_text()) or {}
        keys.update(_dotted(content, "" if is_global else f"{group}."))
        keys.add(group)
    return sorted(keys - {""})


def _dotted(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")


def broken_rule(error: ValidationError, group: str = "") -> str:
    """Return the message for the first value that pydantic refuses; `group` has the value."""
    errors = error.errors()
    first: Mapping[str, Any] = errors[0]
    if first["type"].startswith(("unexpected", "missing", "extra")):
        names = [".".join(map(str, each["loc"])) for each in errors]
        what = "; ".join(
            f"{each['msg'].lower()}: {name}"
            for each, name in zip(errors, names, strict=True)
        )
        other_kind = {"num_classes", "vocabulary"} & set(names)
        advice = SEE_HELP
        if other_kind:
            advice = (
                "Choose data and a model that match, such as data=text model=gpt_tiny."
            )
        return f"{WHO}: {group or 'the configuration'}: {what}. {advice}"
    # Where a value may have several types, one part is a type, such as dict[str,int].
    parts = [str(p) for p in (group, *first["loc"]) if re.fullmatch(r"[\w.]+", str(p))]
    text = repr(first["input"])[:200]
    value = YAML_NAMES.get(text, text)
    return f"{WHO}: {'.'.join(parts)} should {rule_of(error)}; got {value}."


def rule_of(error: ValidationError) -> str:
    """Return the rule that a value breaks, or those of the types that it may have."""
    errors: Sequence[Mapping[str, Any]] = error.errors()
    plain = [each for each in errors if each["type"] != "is_instance_of"]
    rules = [re.sub(r"^\w+ should (be )?", "", each["msg"]) for each in plain or errors]
    return f"be {' or '.join(dict.fromkeys(rules))}"


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, without its full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:500].rstrip(".!?")
