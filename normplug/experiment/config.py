"""Check a composed configuration before a run does anything, and name arms and directories.

Each mistake is one sentence. `RULES` has the type of each key that train.py reads. Data and models
check their own arguments (`checked`), and the optimizer is built once, on two small parameters. The
few mistakes that remain raise when an object is built; `errors.user_sentence` makes sentences of
them.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, validate_call

import normplug
from normplug._swap.depth import ByDepth, Schedule
from normplug.experiment.errors import NAME, WHO, UserError, broken_rule, one_line, shown
from normplug.experiment.measure import BASELINE

SEE_HELP = "`python train.py --help` lists the keys."
LONGEST_NAME = 180  # bytes; file systems allow 255

# Types of values, for `RULES` and for the annotations of data and models.
Count: TypeAlias = Annotated[int, Field(ge=1, lt=2**31)]
Natural: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
Number: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Name: TypeAlias = Annotated[str, Field(pattern=NAME)]
Patterns: TypeAlias = str | Annotated[list[str], Field(min_length=1)] | None


def mean_inverse_depth(block: int, blocks: int) -> float:
    """The mean of 1/l over all blocks, the same in each: "1/l" without its dependence on depth."""
    return sum(1.0 / (number + 1) for number in range(blocks)) / blocks


# Modes that set a target variance per layer: the values of `mode`, and their schedules.
BY_DEPTH: dict[str, str | Schedule] = {
    "inverse_depth": "1/l",
    "reversed_depth": "reversed",
    "mean_inverse_depth": mean_inverse_depth,
}
RULES: dict[str, Any] = {
    "seed": Seed,
    "gamma0": Positive | Literal["inverse_depth", "reversed_depth", "mean_inverse_depth"] | None,
    "train": bool,
    "compile": bool,
    "graph": bool,
    "fuse": bool | None,
    "recompute": bool,
    "channels_last": bool,
    "ckpt_path": str | None,
    "schedule": Literal["one_cycle", "cosine", "constant"],
    "warmup": Fraction,
    "cycle_momentum": bool,
    "label_smoothing": Annotated[float, Field(ge=0, le=1)],
    "study": Name | int,
    "tag": Name | int | float | Literal[""] | None,
    "swap": dict,
    "swap.include": Patterns,
    "swap.exclude": Patterns,
    "data": dict,
    "model": dict,
    "optimizer": dict,
    "optimizer.lr": Positive,
    "trainer": dict,
    "trainer.log_every_n_steps": Natural,
    "trainer.accumulate_grad_batches": Count,
    "trainer.check_val_every_n_epoch": Count | None,
    "trainer.gradient_clip_val": Number | None,
    "trainer.limit_train_batches": Positive | None,
    "trainer.limit_test_batches": Positive | None,
    "callbacks": dict[str, dict | None] | list | None,
    "logger": dict[str, dict | None] | list | None,
}
KEYS = {key for key in RULES if "." not in key} | {"mode"}
OPTIONAL = {"callbacks", "logger"}
# What train.py itself passes to the object of a group, and where that comes from.
SUPPLIED = {
    "trainer.callbacks": "the group callbacks",
    "trainer.logger": "the group logger",
    "swap.model": "the group model",
    "swap.mode": "the key mode",
}
# Decorates what the configuration builds: its arguments must match their annotations.
checked = validate_call(config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def check(cfg: DictConfig) -> None:
    """Refuse a configuration that cannot run, or that asks for something without effect.

    Raises:
        UserError: names the key, the rule, the value and a way out.
    """
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        what = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"{WHO}: {what}{str(error).splitlines()[0]}. {SEE_HELP}") from None
    values = cast(dict[str, Any], container)
    for key in sorted((values.keys() ^ KEYS) - OPTIONAL):
        if key in values:
            advice = suggestion(key, KEYS)
            raise UserError(f"{WHO}: {key} is not a key of the configuration. {advice}")
        raise UserError(f"{WHO}: the configuration lacks the key {key}. {SEE_HELP}")
    for key, hint in RULES.items():
        for value in _at(values, key):
            _check_value(key, hint, value)
    for key, origin in SUPPLIED.items():
        if _at(values, key):
            raise UserError(f"{WHO}: {key} comes from {origin}. Leave it out.")
    options = inspect.signature(normplug.swap).parameters
    for key in values["swap"].keys() - options.keys():
        advice = suggestion(key, options, "swap.")
        raise UserError(f"{WHO}: swap.{key} is not an argument of normplug.swap. {advice}")
    _check_trainer(values)
    _check_optimizer(cfg)
    _check_mode(cfg.mode)


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Advice for an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    if not names:
        return "Leave it out."
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.7):
        return f"Did you mean {prefix}{near[0]}?"
    return f"Leave it out (~{prefix}{name}), or use one of {', '.join(names)}."


def _at(values: Any, key: str) -> list[Any]:
    """Return the value of a dotted key, in a list; [] if it is not set."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return []
        values = values[part]
    return [values]


def _check_value(key: str, hint: Any, value: Any) -> None:
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        raise UserError(broken_rule(key, error, value)) from None


def _check_trainer(values: Mapping[str, Any]) -> None:
    trainer = values["trainer"]
    limited = trainer.get("max_steps", -1) != -1 or trainer.get("max_time") is not None
    kind = Annotated[int, Field(ge=-1)] | None if limited else Count
    _check_value("trainer.max_epochs", kind, trainer.get("max_epochs"))
    if trainer.get("sync_batchnorm") and values["mode"] != BASELINE:
        raise UserError(
            f"{WHO}: trainer.sync_batchnorm=true rebuilds every BatchNorm as a stock "
            f"SyncBatchNorm, which would drop mode={values['mode']}. Use instead "
            "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms}]'."
        )
    if not values["train"] and values["ckpt_path"] is None:
        raise UserError(f"{WHO}: train=false only tests a checkpoint. Set ckpt_path=FILE.")


def _check_optimizer(cfg: DictConfig) -> None:
    try:
        probe_optimizer(instantiate(cfg.optimizer, _convert_="all"))
    except Exception as error:  # each optimizer raises its own types
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        given = ", ".join(f"{k}={shown(v)}" for k, v in cfg.optimizer.items() if str(k)[:1] != "_")
        raise UserError(
            f"{WHO}: {cfg.optimizer._target_} refuses its settings: {one_line(cause or error)}; "
            f"got {given}. Change optimizer.*."
        ) from None


def probe_optimizer(make: Any) -> dict[str, Any]:
    """Build an optimizer of a matrix and a bias; return its state for a parameter after a step."""
    matrix, bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,)))
    optimizer = make([{"params": [matrix]}, {"params": [bias], "weight_decay": 0.0}])
    matrix.grad, bias.grad = torch.zeros_like(matrix), torch.zeros_like(bias)
    optimizer.step()
    return dict(optimizer.state.get(matrix, {}))


def _check_mode(mode: Any) -> None:
    try:
        arm_name(mode)
    except (TypeError, ValueError) as error:
        by_depth = f"By depth: mode={' or mode='.join(BY_DEPTH)}."
        raise UserError(f"{error} Or mode=baseline, which swaps nothing. {by_depth}") from None


def mode_of(mode: str | float) -> normplug.NormMode | ByDepth:
    """Convert a value of the key `mode` to a mode of `normplug.swap`.

    Raises:
        ValueError: it is neither a mode nor one of `BY_DEPTH`.
    """
    if isinstance(mode, str) and mode in BY_DEPTH:
        return normplug.by_depth(BY_DEPTH[mode])
    return normplug.NormMode(mode)


def arm_name(
    mode: str | float,
    gamma0: float | str | None = None,
    tag: str | None = None,
    autocast_output: str | None = None,
) -> str:
    """Return the arm's name in directories, results and tables.

    Args:
        mode: "baseline", one of `BY_DEPTH`, or "golden", "standard" or a number.
        gamma0: in the name if it is not None, e.g. `standard-gamma0_0.786` or
            `standard-gamma0_inverse_depth`.
        tag: the last part of the name, if it is neither None nor "".
        autocast_output: of `normplug.swap`, in the name unless it is that function's default "low"
            or the arm is not swapped, e.g. `standard-autocast_float32`.

    Raises:
        ValueError: unknown mode.
        TypeError: a mode that is neither text nor a number.
    """
    parts = [mode if mode in (BASELINE, *BY_DEPTH) else str(normplug.NormMode(mode))]
    if gamma0 is not None:
        parts.append(f"gamma0_{gamma0 if isinstance(gamma0, str) else format(gamma0, 'g')}")
    if autocast_output not in (None, "low") and mode != BASELINE:
        parts.append(f"autocast_{autocast_output}")
    if tag not in (None, ""):
        parts.append(str(tag))
    return "-".join(map(str, parts))


def arm_or_mode(mode: Any, *others: Any) -> str:
    """`arm_name`, or `mode` if it is invalid: directories are named before it is checked."""
    try:
        return arm_name(mode, *others)
    except (ValueError, TypeError):
        return str(mode)


def path_name(text: Any) -> str:
    """Turn any text into the name of a file or directory.

    Letters, digits and `._+-` stay; everything else becomes `_`, since a slash leaves the directory
    and `=` breaks Lightning's command for the processes of a distributed run. A long name is
    truncated and ends in a hash of all of it.
    """
    name = re.sub(r"[^\w.+-]+", "_", str(text)).strip("_")
    if name.startswith("."):
        name = f"_{name}"
    if len(name.encode()) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name.encode()[: LONGEST_NAME - 9].decode(errors='ignore')}_{digest}"
    return name or "_"


OmegaConf.register_new_resolver(
    "normplug.arm", lambda *arm: path_name(arm_or_mode(*arm)), replace=True
)
OmegaConf.register_new_resolver("normplug.name", path_name, replace=True)
