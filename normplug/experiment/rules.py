"""The rules for the values of the configuration's keys."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from normplug.experiment.names import SCHEDULES as BY_DEPTH
from normplug.experiment.optimizing import SCHEDULES


class Rule(NamedTuple):
    """A rule for the value of a key; a key that is not set is not checked.

    Attributes:
        key: its path, e.g. "data.batch_size".
        holds: whether a value is allowed.
        must: the rest of a sentence that begins with the key.
    """

    key: str
    holds: Callable[[Any], bool]
    must: str


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return re.fullmatch(r"[^/\\.][^/\\]{0,99}", str(value)) is not None and not isinstance(
        value, (bool, list, dict, types.NoneType)
    )


def _is_pattern(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, list) and bool(value))


def _or_null(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def _integer(key: str, least: int, *, or_null: bool = False) -> Rule:
    rule = Rule(key, lambda x: is_integer(x) and x >= least, f"must be an integer >= {least}")
    return Rule(key, _or_null(rule.holds), f"{rule.must}, or null") if or_null else rule


def _flag(key: str) -> Rule:
    return Rule(key, _is_bool, "must be true or false")


NAME = "must be a name: at most 100 characters, without slashes, not beginning with a dot"
SEED = "must be from 0 to 4294967295"
POSITIVE = "must be a finite number above 0"
PATTERNS = "must be null, a pattern such as 'layer4.*', or a list of at least one pattern"

RULES = (
    Rule("seed", is_integer, "must be an integer"),
    Rule("seed", lambda seed: 0 <= seed < 2**32, SEED),
    Rule(
        "gamma0",
        _or_null(lambda value: _is_positive(value) or value in tuple(BY_DEPTH)),
        f"scales the norms' initial weights and {POSITIVE}, one of {', '.join(BY_DEPTH)}, or null",
    ),
    _flag("compile"),
    _flag("graph"),
    Rule("fuse", _or_null(_is_bool), "must be true, false or null"),
    _flag("recompute"),
    _flag("channels_last"),
    Rule("ckpt_path", _or_null(_is_text), "must be the path of a checkpoint, or null"),
    Rule("schedule", lambda value: value in SCHEDULES, f"must be one of {', '.join(SCHEDULES)}"),
    Rule("warmup", _is_fraction, "must be a fraction of all steps, at least 0 and below 1"),
    Rule(
        "label_smoothing", lambda x: _is_number(x) and 0 <= x <= 1, "must be a number from 0 to 1"
    ),
    Rule("study", _is_name, NAME),
    Rule("tag", _or_null(lambda tag: tag == "" or _is_name(tag)), f"{NAME}; or null"),
    Rule("swap.include", _or_null(_is_pattern), PATTERNS),
    Rule("swap.exclude", _or_null(_is_pattern), PATTERNS),
    Rule("data.seed", is_integer, "must be an integer"),
    Rule("data.seed", lambda seed: 0 <= seed < 2**32, SEED),
    _integer("data.batch_size", 1),
    _integer("data.image_size", 1, or_null=True),
    _integer("data.num_classes", 2),
    _integer("data.num_images", 1),
    _integer("data.num_workers", 0),
    Rule("data.memory_gib", lambda x: _is_number(x) and x >= 0, "must be a finite number >= 0"),
    _integer("data.block_size", 1),
    Rule("data.megabytes", _or_null(_is_positive), f"{POSITIVE}, or null"),
    Rule("data.val_fraction", lambda x: _is_fraction(x) and x > 0, "must be above 0 and below 1"),
    _integer("data.augment.pad", 0),
    _flag("data.augment.flip"),
    Rule("optimizer.lr", _is_positive, POSITIVE),
    _integer("model.patch_size", 1, or_null=True),
    _integer("model.hidden_dim", 1),
    _integer("model.width", 1),
    _integer("model.depth", 1),
    _integer("model.heads", 1),
    _integer("model.mlp_ratio", 1),
    Rule("model.dropout", _is_fraction, "must be at least 0 and below 1"),
    _integer("trainer.log_every_n_steps", 0),
    _integer("trainer.num_sanity_val_steps", -1),
    _integer("trainer.accumulate_grad_batches", 1),
    _integer("trainer.check_val_every_n_epoch", 1, or_null=True),
    Rule(
        "trainer.max_steps",
        lambda steps: is_integer(steps) and (steps == -1 or steps >= 1),
        "must be an integer >= 1, or -1 for no limit",
    ),
    Rule(
        "trainer.gradient_clip_val",
        _or_null(lambda norm: _is_number(norm) and norm >= 0),
        "must be a finite number >= 0, or null",
    ),
    Rule(
        "trainer.val_check_interval",
        lambda value: not isinstance(value, (int, float)) or _is_positive(value),
        "must be above 0, a time, or null",
    ),
    Rule("trainer.limit_train_batches", _or_null(_is_positive), f"{POSITIVE}, or null"),
    Rule("trainer.limit_test_batches", _or_null(_is_positive), f"{POSITIVE}, or null"),
)
