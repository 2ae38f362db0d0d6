"""Check a composed configuration before a run does anything, and name arms and directories."""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Annotated, Any, Literal, TypeAlias, cast

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, validate_call
from typing_extensions import NotRequired, TypedDict  # pydantic cannot read Python's before 3.12

import normplug
from normplug._swap.layer_modes import ByDepth, Schedule
from normplug.experiment.errors import NAME, WHO, UserError, broken_rule
from normplug.experiment.measure import BASELINE

# Types of values, for `Config` and for the annotations of data and models.
Count: TypeAlias = Annotated[int, Field(ge=1, lt=2**31)]
Natural: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
Number: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Name: TypeAlias = Annotated[str, Field(pattern=NAME)]
Group: TypeAlias = dict[str, dict | None] | list | None
# Decorates what the configuration builds: its arguments must match their annotations.
checked = validate_call(config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def mean_inverse_depth(block: int, blocks: int) -> float:
    """The mean of 1/l over all blocks: every block gets the same target."""
    return sum(1.0 / (number + 1) for number in range(blocks)) / blocks


# A value of `mode` that sets a target variance per block -> the schedule of `by_depth`.
BY_DEPTH: dict[str, str | Schedule] = {
    "inverse_depth": "1/l",
    "reversed_depth": "reversed",
    "mean_inverse_depth": mean_inverse_depth,
}


class OptimizerKeys(TypedDict, total=False):
    """The optimizer's arguments. It checks all but `lr` itself."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    lr: Positive


class Config(TypedDict):
    """The keys of configs/train.yaml, which explains them. Data and models are `checked`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    mode: Any
    gamma0: Positive | Literal["inverse_depth", "reversed_depth", "mean_inverse_depth"] | None
    swap: dict
    seed: Seed
    compile: bool
    graph: bool
    fuse: bool | None
    recompute: bool
    channels_last: bool
    train: bool
    ckpt_path: str | None
    schedule: Literal["one_cycle", "cosine", "constant"]
    warmup: Fraction
    cycle_momentum: bool
    label_smoothing: Annotated[float, Field(ge=0, le=1)]
    study: Name | int
    tag: Name | int | float | Literal[""] | None
    data: dict
    model: dict
    optimizer: OptimizerKeys
    trainer: dict
    callbacks: NotRequired[Group]
    logger: NotRequired[Group]


def check(cfg: DictConfig, fuses: bool) -> None:
    """Refuse a configuration that cannot run, or that asks for something without effect.

    `fuses`: whether the run fuses its swapped norms. `errors.user_sentence` makes one sentence of
    what this raises.
    """
    values = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    try:
        TypeAdapter(Config).validate_python(values, strict=True)
        inspect.signature(normplug.swap).bind(None, cfg.mode, **values["swap"])
    except ValidationError as error:
        raise UserError(broken_rule(error)) from None
    except TypeError as error:
        raise UserError(f"{WHO}: swap.*: normplug.swap {error}. Change swap.*.") from None
    try:
        if cfg.mode != BASELINE:
            mode_of(cfg.mode)
    except (TypeError, ValueError) as error:
        by_depth = f"By depth: mode={' or mode='.join(BY_DEPTH)}."
        raise UserError(f"{error} Or mode=baseline, which swaps nothing. {by_depth}") from None
    trainer = values["trainer"]
    if given := {"callbacks", "logger"} & trainer.keys():
        raise UserError(f"{WHO}: trainer.{min(given)} comes from a group of its own. Leave it out.")
    if trainer.get("sync_batchnorm") and cfg.mode != BASELINE:
        raise UserError(
            f"{WHO}: trainer.sync_batchnorm=true rebuilds every BatchNorm as a stock "
            f"SyncBatchNorm, which would drop mode={cfg.mode}. Use instead "
            "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms}]'."
        )
    if not cfg.train and cfg.ckpt_path is None:
        raise UserError(f"{WHO}: train=false only tests a checkpoint. Set ckpt_path=FILE.")
    if cfg.recompute and cfg.mode != BASELINE and (cfg.compile or not fuses):
        raise UserError(
            f"{WHO}: recompute=true is for fused norms (fuse=true, or null on a GPU) without "
            "compile=true: the compiler decides by itself what to recompute."
        )
    matrix, bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,)))
    groups = [{"params": [matrix]}, {"params": [bias], "weight_decay": 0.0}]
    instantiate(cfg.optimizer, groups, _convert_="all", _partial_=False)


def mode_of(mode: str | float) -> normplug.NormMode | ByDepth:
    """Convert a value of the key `mode` to a mode of `normplug.swap`."""
    if isinstance(mode, str) and mode in BY_DEPTH:
        return normplug.by_depth(BY_DEPTH[mode])
    return normplug.NormMode(mode)


def arm_name(mode: str | float, gamma0: float | str | None = None, tag: str | None = None) -> str:
    """Return the arm's name in directories, results and tables.

    Args:
        mode: "baseline", one of `BY_DEPTH`, or "golden", "standard" or a number. An invalid mode
            stays as it is, since directories are named before the mode is checked.
        gamma0: gives names such as `standard-gamma0_0.786` or `standard-gamma0_inverse_depth`.
        tag: the last part of the name, if it is neither None nor "".
    """
    parts: list[Any] = [mode]
    with contextlib.suppress(TypeError, ValueError):
        parts = [str(normplug.NormMode(mode))]
    if gamma0 is not None:
        number = isinstance(gamma0, (int, float))
        parts.append(f"gamma0_{format(gamma0, 'g') if number else gamma0}")
    if tag not in (None, ""):
        parts.append(tag)
    return "-".join(map(str, parts))


def path_name(text: Any) -> str:
    """Turn any text into the name of a file or directory, of at most 180 characters.

    Letters, digits and `._+-` stay. Everything else becomes `_`: a slash would name a subdirectory,
    and `=` would break the command with which Lightning starts other processes.
    """
    name = re.sub(r"[^\w.+-]+", "_", str(text)).strip("_")[:180]
    return f"_{name}" if name.startswith(".") else name or "_"


OmegaConf.register_new_resolver(
    "normplug.arm", lambda *arm: path_name(arm_name(*arm)), replace=True
)
OmegaConf.register_new_resolver("normplug.name", path_name, replace=True)
