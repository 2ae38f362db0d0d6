"""Check a composed configuration before a run does anything; each mistake is one sentence.

Three kinds of check find almost every mistake. `RULES` says what the value of each key must be.
Every mapping with a `_target_` must match the signature and annotations of its target. The
optimizer is built once, on two small parameters. The few mistakes that remain raise when an object
is built; `errors.building_sentence` turns these into one sentence too.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import normplug
from normplug._report.arms import BASELINE
from normplug.experiment.building import fuses
from normplug.experiment.errors import WHO, UserError, one_line
from normplug.experiment.names import SCHEDULES, mode_of
from normplug.experiment.optimizing import decay_groups
from normplug.experiment.rules import RULES, is_integer
from normplug.experiment.signatures import accepts, described, shown, signature_of
from normplug.experiment.source import Source

SEE_HELP = "`python train.py --help` lists the keys."

# The arguments that train.py itself passes to the object of a group, and where they come from.
# `Source.gives` lists those that a model takes from the data.
SUPPLIED = {
    "optimizer": {"params": "the model"},
    "trainer": {"callbacks": "the group callbacks", "logger": "the group logger"},
    "swap": {"model": "the group model", "mode": "the key mode"},
}
BUILT = ("data", "model", "optimizer", "trainer")  # each is one object
COLLECTIONS = ("callbacks", "logger")  # each is a mapping of objects, or null for no object
# Values that train.py replaces before the Trainer sees them.
AUTO = {"trainer.precision": "auto", "trainer.enable_progress_bar": "auto"}


def check(cfg: DictConfig) -> None:
    """Refuse a configuration that cannot run, or that asks for something without effect.

    Raises:
        UserError: names the key, the rule, the value and a way out.
    """
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        what = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"{WHO}: {what}{str(error).splitlines()[0]}. {SEE_HELP}") from None
    values = cast(dict[str, Any], values)
    _check_keys(values)
    for rule in RULES:
        found, value = _select(values, rule.key)
        if found and not rule.holds(value):
            raise UserError(f"{WHO}: {rule.key} {rule.must}; got {shown(value)}.")
    _check_epochs(values["trainer"])
    _check_sync(values)
    _check_target("swap", values["swap"], normplug.swap)
    _check_node("data", values["data"])
    _check_model(values)
    for group in ("optimizer", "trainer"):
        _check_node(group, values[group])
    for group in COLLECTIONS:
        for name, node in (values.get(group) or {}).items():
            if node is not None:
                _check_node(f"{group}.{name}", node)
    _check_optimizer(cfg)
    _check_mode(cfg.mode)
    _check_recompute(cfg)


def _check_keys(values: Mapping[str, Any]) -> None:
    single = {rule.key for rule in RULES if "." not in rule.key} | {"mode", "swap"}
    for key in sorted(values.keys() - single - {*BUILT, *COLLECTIONS}):
        raise UserError(
            f"{WHO}: {key} is not a key of the configuration. "
            f"{_suggestion(key, single | {*BUILT, *COLLECTIONS})}"
        )
    for key in (*sorted(single), *BUILT):
        if key not in values:
            raise UserError(f"{WHO}: the configuration lacks the key {key}. {SEE_HELP}")
    for key in (*BUILT, "swap"):
        if not isinstance(values[key], dict):
            raise UserError(f"{WHO}: {key} must be a mapping; got {shown(values[key])}. {SEE_HELP}")
    for key in COLLECTIONS:
        if not isinstance(values.get(key) or {}, dict):
            raise UserError(
                f"{WHO}: {key} must be a mapping of objects, or null; got {shown(values[key])}."
            )


def _check_epochs(trainer: Mapping[str, Any]) -> None:
    epochs: Any = trainer.get("max_epochs")
    steps: int = trainer.get("max_steps", -1)
    if is_integer(epochs) and epochs >= 1:
        return
    if steps >= 1 and (epochs is None or (is_integer(epochs) and epochs == -1)):
        return
    raise UserError(
        f"{WHO}: trainer.max_epochs must be an integer >= 1, or null with +trainer.max_steps; "
        f"got {shown(epochs)}."
    )


def _check_sync(values: Mapping[str, Any]) -> None:
    if values["trainer"].get("sync_batchnorm") and values["mode"] != BASELINE:
        raise UserError(
            f"{WHO}: trainer.sync_batchnorm=true rebuilds every BatchNorm as a stock "
            f"SyncBatchNorm, which would drop mode={values['mode']}. Use instead "
            "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms}]'."
        )


def _check_optimizer(cfg: DictConfig) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,))]
    try:
        instantiate(cfg.optimizer, _convert_="all")(decay_groups(parameters))
    except Exception as error:  # each optimizer raises its own types
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        settings = cast(dict[str, Any], OmegaConf.to_container(cfg.optimizer, resolve=True))
        given = ", ".join(f"{k}={shown(v)}" for k, v in settings.items() if k[:1] != "_")
        raise UserError(
            f"{WHO}: {cfg.optimizer._target_} refuses its settings: {one_line(cause or error)}; "
            f"got {given}. Change optimizer.*."
        ) from None


def _check_mode(mode: Any) -> None:
    if mode == BASELINE:
        return
    try:
        mode_of(mode)
    except (TypeError, ValueError) as error:
        by_depth = f"By depth: mode={' or mode='.join(SCHEDULES)}."
        raise UserError(f"{error} Or mode=baseline, which swaps nothing. {by_depth}") from None


def _check_recompute(cfg: DictConfig) -> None:
    if cfg.recompute and cfg.mode != BASELINE and (cfg.compile or not fuses(cfg)):
        raise UserError(
            f"{WHO}: recompute=true is for fused norms (fuse=true, or null on a GPU) without "
            "compile=true: the compiler decides by itself what to recompute."
        )


def source_class(target: str) -> type[Source]:
    """The class of `data._target_`.

    Raises:
        UserError: it is not a subclass of `Source`.
    """
    found = get_object(target)
    if isinstance(found, type) and issubclass(found, Source):
        return found
    raise UserError(
        f"{WHO}: data._target_ must be a subclass of {Source.__module__}.Source; got {target!r}. "
        "Choose a file of configs/data."
    )


def _check_model(values: Mapping[str, Any]) -> None:
    """Check the model, which must accept the arguments that come from the data."""
    data = values["data"]["_target_"]
    given = source_class(data).gives
    signature = signature_of(_target_of("model", values["model"]))
    if signature and not signature.is_open and (other := set(given) - signature.hints.keys()):
        raise UserError(
            f"{WHO}: {values['model']['_target_']} does not take {', '.join(sorted(other))}, which "
            f"{data} passes to its model. Choose a model and data that match, such as "
            "model=gpt_tiny data=text or model=resnet18 data=digits."
        )
    _check_node("model", values["model"], dict.fromkeys(given, "the data"))


def _target_of(key: str, node: Any) -> Any:
    """Return the class or function that a mapping with a `_target_` names."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise UserError(
            f"{WHO}: {key} must be a mapping with a _target_; got {shown(node)}. Choose a file of "
            f"configs/{key.split('.')[0]}, or name the class in {key}._target_."
        )
    try:
        return get_object(str(node["_target_"]))
    except Exception as error:  # the import of a module may raise anything
        raise UserError(
            f"{WHO}: {key}._target_ must be the import path of a class or function; "
            f"got {node['_target_']!r} ({one_line(error)})."
        ) from None


def _check_node(key: str, node: Any, supplied: Mapping[str, str] | None = None) -> None:
    """Check a mapping with a `_target_`, and the mappings inside it.

    `supplied` are the arguments that train.py itself passes, and where they come from; by default,
    those of `SUPPLIED`.
    """
    _check_target(key, node, _target_of(key, node), supplied)
    for name, value in node.items():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict) and "_target_" in inner:
                _check_node(f"{key}.{name}", inner)


def _check_target(
    key: str, node: Mapping[str, Any], target: Any, supplied: Mapping[str, str] | None = None
) -> None:
    """Check the names and the types of the arguments that `node` gives to `target`."""
    supplied = SUPPLIED.get(key, {}) if supplied is None else supplied
    given = {name: value for name, value in node.items() if name[:1] != "_"}
    for name, origin in supplied.items():
        if name in given:
            raise UserError(f"{WHO}: {key}.{name} comes from {origin}. Leave {key}.{name} out.")
    signature = signature_of(target)
    if signature is None:
        return
    for name in given:
        if name not in signature.hints and not signature.is_open:
            raise UserError(
                f"{WHO}: {key}.{name} is not an argument of "
                f"{node.get('_target_', f'normplug.{key}')}. "
                f"{_suggestion(name, signature.hints.keys() - supplied.keys(), f'{key}.')}"
            )
    lacking = signature.required - given.keys() - supplied.keys()
    if lacking and not {"_args_", "_partial_"} & node.keys():
        raise UserError(
            f"{WHO}: {key} needs {', '.join(sorted(lacking))} for {node['_target_']}. "
            f"Set +{key}.{min(lacking)}=VALUE."
        )
    for name, value in given.items():
        hint = signature.hints.get(name, Any)
        default = signature.defaults.get(name, inspect.Parameter.empty)
        if type(value) is type(default) and value == default:  # whatever its annotation says
            continue
        if not accepts(hint, value) and (f"{key}.{name}", value) not in AUTO.items():
            raise UserError(f"{WHO}: {key}.{name} must be {described(hint)}; got {shown(value)}.")


def _suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Advice for an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    if not names:
        return "Leave it out."
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.8):
        return f"Did you mean {prefix}{near[0]}?"
    return f"Leave it out (~{prefix}{name}), or use one of {', '.join(names)}."


def _select(values: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """Whether a dotted key is set, and its value."""
    value: Any = values
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value
