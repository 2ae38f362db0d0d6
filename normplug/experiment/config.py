"""Check a composed configuration, name arms and directories, and say what a mistake is."""

from __future__ import annotations

import contextlib
import difflib
import errno
import inspect
import re
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException, HydraException, InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    ConfigDict,
    Field,
    PositiveFloat,
    TypeAdapter,
    ValidationError,
    validate_call,
)
from typing_extensions import (  # pydantic cannot read Python's before 3.12
    NotRequired,
    TypedDict,
)

import normplug
from normplug._swap.layer_modes import ByDepth, Schedule
from normplug.compare.measure import BASELINE

WHO = "normplug.experiment"
PLACE = "hydra.run.dir=DIR, or study=NAME for a sweep"
CHOICES = "hydra:runtime.choices."  # before the name of a group of configs/, in an interpolation
# Groups whose choices set other keys that name a directory.
NAMED = ("arm", "experiment")
SEE_HELP = "`python train.py --help` lists the keys."
UNWRITABLE = {  # full, over a limit, no permission, or no place for a directory
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES,
    errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR,
}  # fmt: skip

# Types of values, for `Config` and for the annotations of data and models.
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Factor: TypeAlias = Annotated[float, Field(ge=0)]
Group: TypeAlias = dict[str, dict | None] | list | None
# Decorates what the configuration builds: its arguments must match their annotations.
checked = validate_call(config=ConfigDict(strict=True, arbitrary_types_allowed=True))

# A value of `mode` that sets a target variance per block -> the schedule of `by_depth`.
BY_DEPTH: dict[str, str | Schedule] = {
    "inverse_depth": "1/l",
    "reversed_depth": "reversed",
    "mean_inverse_depth": lambda _, blocks: (
        sum(1 / (n + 1) for n in range(blocks)) / blocks
    ),
}


class Factors(TypedDict):
    """Factors of the kinds of parameters; `gamma0` scales the initial weights of norms."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    norm_weight: dict[Literal["lr", "decay"], Factor]
    norm_bias: dict[Literal["lr", "decay"], Factor]
    head: dict[Literal["lr", "decay", "start"], Factor]


class Config(TypedDict):
    """The keys of configs/train.yaml, which explains them. Objects check their own arguments."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    mode: Any
    gamma0: (
        PositiveFloat
        | Literal["inverse_depth", "reversed_depth", "mean_inverse_depth"]
        | None
    )
    factors: Factors
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
    study: str | int
    tag: str | int | float | None
    data: dict
    model: dict
    optimizer: dict
    trainer: dict
    callbacks: NotRequired[Group]
    logger: NotRequired[Group]


def check(cfg: DictConfig, fuses: bool) -> None:
    """Refuse a configuration that cannot run, or that asks for something without effect."""
    values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
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
        raise UserError(
            f"{error} Or mode=baseline, which swaps nothing. {by_depth}"
        ) from None
    trainer = values["trainer"]
    if given := {"callbacks", "logger"} & trainer.keys():
        raise UserError(
            f"{WHO}: trainer.{min(given)} comes from a group of its own. Leave it out."
        )
    if trainer.get("sync_batchnorm") and cfg.mode != BASELINE:
        raise UserError(
            f"{WHO}: trainer.sync_batchnorm=true rebuilds every BatchNorm as a stock "
            f"SyncBatchNorm, which would drop mode={cfg.mode}. Use instead "
            "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms}]'."
        )
    if not cfg.train and cfg.ckpt_path is None:
        raise UserError(
            f"{WHO}: train=false only tests a checkpoint. Set ckpt_path=FILE."
        )
    if cfg.recompute and cfg.mode != BASELINE and (cfg.compile or not fuses):
        raise UserError(
            f"{WHO}: recompute=true is for fused norms (fuse=true, or null on a GPU) without "
            "compile=true: the compiler decides by itself what to recompute."
        )
    matrix, bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,)))
    groups = [{"params": [matrix]}, {"params": [bias], "weight_decay": 0.0}]
    instantiate(cfg.optimizer, groups, _convert_="all", _partial_=False)


class UserError(CompactHydraException):
    """A mistake in the command: the message is one sentence, and no traceback follows."""


def user_sentence(error: BaseException, checkpoint: Path | None = None) -> str | None:
    """Return the message for the user; None if the error is a bug, which needs its traceback."""
    cause: BaseException | None = error
    while cause is not None:  # the errors that Python's traceback shows
        if str(cause).startswith("normplug"):
            return str(cause)
        reads = isinstance(error, InstantiationException) or (
            checkpoint and getattr(cause, "filename", None) == str(checkpoint)
        )
        frames = traceback.extract_tb(cause.__traceback__)
        makes = bool(frames) and frames[-1].name in (
            "mkdir",
            "mkdtemp",
        )  # fails below /proc
        if (
            isinstance(cause, OSError)
            and (cause.errno in UNWRITABLE or makes)
            and not reads
        ):
            path = Path(cause.filename or "a file of the run").absolute()
            return (
                f"{WHO}: {path} cannot be written: {cause.strerror}. Free up space or make it "
                f"writable, or choose another directory: {PLACE}."
            )
        cause = cause.__cause__ or (
            None if cause.__suppress_context__ else cause.__context__
        )
    if isinstance(error, InstantiationException):
        key = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
        where = key[1] if key else "an object of the configuration"
        if isinstance(error.__cause__, ValidationError):
            return broken_rule(error.__cause__, where)
        why, group = one_line(error.__cause__ or error), where.split(".")[0]
        return f"{WHO}: {where} cannot be built: {why}. Change the keys of {group}."
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        text = re.sub(r" full_key: (\S+)( object_type=\w+)?", r" (\1)", one_line(error))
        if unknown := re.match(r"Could not override '([\w.]+)'", text):
            near = difflib.get_close_matches(
                unknown[1], Config.__annotations__, 1, cutoff=0.7
            )
            advice = f"Did you mean {near[0]}?" if near else SEE_HELP
            return f"{WHO}: {unknown[1]} is not a key of the configuration. {advice}"
        return f"{WHO}: {text}. {SEE_HELP}"
    frames = traceback.extract_tb(error.__traceback__)
    if checkpoint and any(f.filename.endswith("checkpoint_connector.py") for f in frames):
        why = one_line(error).split(". ")[0][
            :200
        ]  # what follows is advice for another program
        return (
            f"{WHO}: the checkpoint {checkpoint} cannot be restored ({type(error).__name__}: "
            f"{why}). Give a whole checkpoint of the same run, or change this run to match it."
        )
    return None


def broken_rule(error: ValidationError, group: str = "") -> str:
    """Return the message for the first value that pydantic refuses; `group` has the value."""
    errors = error.errors()
    first = errors[0]
    if first["type"].startswith(("unexpected", "missing", "extra")):
        what = "; ".join(
            f"{e['msg'].lower()}: {'.'.join(map(str, e['loc']))}" for e in errors
        )
        sizes = {e["loc"][-1] for e in errors} & {"num_classes", "vocabulary"}
        pair = "Choose a model and data that match, such as model=gpt_tiny data=text."
        return f"{WHO}: {group or 'the configuration'}: {what}. {pair if sizes else SEE_HELP}"
    # Where a value may have several types, one part is a type, such as dict[str,int].
    parts = [str(p) for p in (group, *first["loc"]) if re.fullmatch(r"[\w.]+", str(p))]
    rule = re.sub(r"^\w+ should ", "", first["msg"])
    words = {"None": "null", "True": "true", "False": "false"}  # as a user types them
    text = repr(first["input"])[:200]
    return f"{WHO}: {'.'.join(parts)} should {rule}; got {words.get(text, text)}."


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, without its full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:500].rstrip(".!")


def mode_of(mode: str | float) -> normplug.NormMode | ByDepth:
    """Convert a value of the key `mode` to a mode of `normplug.swap`."""
    if isinstance(mode, str) and mode in BY_DEPTH:
        return normplug.by_depth(BY_DEPTH[mode])
    return normplug.NormMode(mode)


def arm_name(
    mode: str | float, gamma0: float | str | None = None, tag: str | None = None
) -> str:
    """Return the arm's name in directories, results and tables, as `standard-gamma0_0.786-tag`."""
    parts: list[Any] = [mode]
    with contextlib.suppress(
        TypeError, ValueError
    ):  # directories are named before `check`
        parts = [str(normplug.NormMode(mode))]
    if gamma0 is not None:
        number = isinstance(gamma0, (int, float))
        parts.append(f"gamma0_{format(gamma0, 'g') if number else gamma0}")
    if tag not in (None, ""):
        parts.append(tag)
    return "-".join(map(str, parts))


def model_name(choice: str, name: str | None = None, arch: str | None = None) -> str:
    """Return the model's name in directories, results and tables.

    It is `model.name` or `model.arch`, such as the "resnet18" of a library, or else the choice from
    configs/model.
    """
    return str(name or arch or choice)


def unnamed_keys(config: DictConfig) -> list[str]:
    """Return the keys of a sweep whose values do not name the directories of its runs.

    `config` is the whole configuration of the sweep. Runs with two values of such a key would get
    one directory, and be one arm of the comparison. A group of configs/ is returned as the key of
    its choice.
    """
    raw: Any = OmegaConf.to_container(config, resolve=False)
    hydra = raw["hydra"]
    params = hydra["sweeper"].get("params") or {}
    lines = [
        *(f"{key}={value}" for key, value in params.items()),
        *hydra["overrides"]["task"],
    ]
    overrides = OverridesParser.create().parse_overrides(lines)
    names = f"{hydra['sweep']['subdir']} {raw.get('tag')}"
    unnamed: list[str] = []
    for override in overrides:
        key = override.key_or_group
        pattern = rf"(?<![\w.])({CHOICES})?{re.escape(key)}(?![\w.])"
        named = key in NAMED or "hydra:job.num" in names or re.search(pattern, names)
        if override.is_sweep_override() and not named:
            is_group = key in hydra["runtime"]["choices"]
            unnamed.append(f"{CHOICES}{key}" if is_group else key)
    return unnamed


def path_name(text: Any) -> str:
    """Turn any text into the name of a file or directory, of at most 180 characters."""
    # A slash would name a subdirectory, and = would break Lightning's commands for more processes.
    name = re.sub(r"[^\w.+-]+", "_", str(text)).strip("_")[:180]
    return f"_{name}" if name.startswith(".") else name or "_"


def direction_of(target: str) -> str:
    """Return the direction of a search by the measure of its data, a class that has this path."""
    measure = getattr(get_object(target), "measure", None)
    if measure is None:
        raise UserError(
            f"{WHO}: data._target_ must be a class with a measure; got {target}. Or set "
            "hydra.sweeper.direction=maximize or =minimize."
        )
    return "maximize" if measure.better == "higher" else "minimize"


OmegaConf.register_new_resolver("normplug.direction", direction_of, replace=True)
OmegaConf.register_new_resolver("normplug.model", model_name, replace=True)
OmegaConf.register_new_resolver("normplug.arm", arm_name, replace=True)
OmegaConf.register_new_resolver("normplug.name", path_name, replace=True)
