"""Check a composed configuration, and name the arms and directories of its runs."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
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
from normplug._measure import BASELINE
from normplug._swap.layer_modes import ByDepth, Schedule, ScheduleName
from normplug.experiment.errors import WHO, UserError, broken_rule, rule_of

CHOICES = "hydra:runtime.choices."  # before the name of a group of configs/, in an interpolation
# Groups whose choices set other keys that name a directory.
NAMED = ("arm", "experiment")

# Types of values, for `Config` and for the annotations of data and models.
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Factor: TypeAlias = Annotated[float, Field(ge=0)]
Group: TypeAlias = dict[str, dict | None] | list | None
CompileMode: TypeAlias = Literal[
    False, True, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
# Decorates what the configuration builds: its arguments must match their annotations.
ARGUMENTS = ConfigDict(strict=True, arbitrary_types_allowed=True)
checked = validate_call(config=ARGUMENTS)

# A value of `mode` that sets a target variance per block -> the schedule of `by_depth`.
BY_DEPTH: dict[str, ScheduleName | Schedule] = {
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
    compile: CompileMode
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
    tags: list[str]
    data: dict
    model: dict
    optimizer: dict
    trainer: dict
    callbacks: NotRequired[Group]
    logger: NotRequired[Group]
    paths: dict[Literal["data_dir", "log_dir", "output_dir"], str]
    extras: dict[Literal["print_config", "enforce_tags", "ignore_warnings"], bool]


def uses_gpu(cfg: DictConfig) -> bool:
    """Whether a run of the configuration trains on a CUDA device."""
    accelerator = value_of(cfg, "trainer.accelerator")
    return accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def fuses_norms(cfg: DictConfig) -> bool:
    """Whether swapped norms are fused; by default, on a GPU."""
    fuse = value_of(cfg, "fuse")
    return uses_gpu(cfg) if fuse is None else fuse


def value_of(cfg: DictConfig, key: str) -> Any:
    """Return a value; None for a key whose interpolation fails, which `check` refuses."""
    return OmegaConf.select(cfg, key, throw_on_resolution_failure=False)


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
    _check_mode(cfg.mode)
    for mistake in _mistakes(cfg, fuses):
        raise UserError(f"{WHO}: {mistake}")
    _check_arguments("trainer", values["trainer"])
    _check_arguments("optimizer", cfg.optimizer)
    matrix = torch.nn.Parameter(torch.zeros(1, 1))
    bias = torch.nn.Parameter(torch.zeros(1))
    groups = [{"params": [matrix]}, {"params": [bias], "weight_decay": 0.0}]
    instantiate(cfg.optimizer, groups, _convert_="all", _partial_=False)


def _mistakes(cfg: DictConfig, fuses: bool) -> Iterator[str]:
    """Yield the rules between several keys that the configuration breaks, with a way out."""
    trainer = cfg.trainer
    for group in ("callbacks", "logger"):
        if group in trainer:
            yield f"trainer.{group} comes from a group of its own. Leave it out."
    if trainer.get("sync_batchnorm") and cfg.mode != BASELINE:
        yield (
            "trainer.sync_batchnorm=true rebuilds every BatchNorm as a stock SyncBatchNorm, which "
            f"would drop mode={cfg.mode}. Use instead "
            "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms}]'."
        )
    if trainer.get("limit_test_batches") == 0:
        yield (
            "trainer.limit_test_batches=0 leaves a run without its test score, by which arms are "
            "compared. Set it to 1 or more."
        )
    if not cfg.train and cfg.ckpt_path is None:
        yield "train=false only tests a checkpoint. Set ckpt_path=FILE."
    if cfg.recompute and cfg.mode != BASELINE and (cfg.compile or not fuses):
        yield (
            "recompute=true is for fused norms (fuse=true, or null on a GPU) without compile=true: "
            "the compiler decides by itself what to recompute."
        )
    if cfg.extras.enforce_tags and not cfg.tags:
        yield "extras.enforce_tags=true needs tags; got none. Set 'tags=[NAME]'."


def _check_mode(mode: Any) -> None:
    try:
        if mode != BASELINE:
            mode_of(mode)
    except (TypeError, ValueError) as error:
        by_depth = f"By depth: mode={' or mode='.join(BY_DEPTH)}."
        raise UserError(
            f"{error} Or mode=baseline, which swaps nothing. {by_depth}"
        ) from None


def _check_arguments(group: str, node: Any) -> None:
    """Refuse a value that is not of the type of the object's argument."""
    with contextlib.suppress(ImportError):  # `instantiate` raises the same, with its key
        target: Any = get_object(node["_target_"])
        builder: Any = target.__init__ if inspect.isclass(target) else target
        _check_types(group, node, get_type_hints(builder))


def _check_types(group: str, node: Any, hints: dict[str, Any]) -> None:
    for key, value in node.items():
        is_plain = isinstance(value, (bool, int, float, str)) and value != "auto"
        if not is_plain or key not in hints:
            continue
        try:
            TypeAdapter(hints[key], config=ARGUMENTS).validate_python(value, strict=True)
        except ValidationError as error:
            raise UserError(
                f"{WHO}: {group}.{key} should {rule_of(error)}; got {value!r}."
            ) from None


def mode_of(mode: Any) -> normplug.NormMode | ByDepth:
    """Convert a value of the key `mode`, a name or a number, to a mode of `normplug.swap`."""
    if isinstance(mode, str) and mode in BY_DEPTH:
        return normplug.by_depth(BY_DEPTH[mode])
    return normplug.NormMode(mode)


def arm_name(mode: Any, gamma0: float | str | None = None, tag: str | None = None) -> str:
    """Return the arm's name in directories and tables, such as `standard-gamma0_0.786-tag`."""
    parts: list[Any] = [mode]
    with contextlib.suppress(TypeError, ValueError):
        # Directories are named before `check`.
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
