"""Check a composed configuration before a run does anything; each mistake is one sentence.

Three rules find almost every mistake. `RULES` says what the values of single keys must be. Every
mapping with a `_target_` must suit the signature and the annotations of what it calls. The
optimizer is made once, of two small parameters. What is left fails when an object is built;
`building_sentence` puts that into one sentence too.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from hydra.errors import CompactHydraException, InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import normplug
from normplug.compare.gather import BASELINE
from normplug.experiment.classifier import SCHEDULES
from normplug.experiment.signatures import accepts, described, shown, signature_of

WHO = "normplug.experiment"
SEE_HELP = "`python train.py --help` lists the keys."

# What train.py itself hands to the object of a group, and where a user sets it instead.
HANDED = {
    "model": {"num_classes": "the data", "image_size": "the data"},
    "optimizer": {"params": "the model"},
    "trainer": {"callbacks": "the group callbacks", "logger": "the group logger"},
    "swap": {"model": "the group model", "mode": "the key mode"},
}
BUILT = ("data", "model", "optimizer", "trainer")  # each is one object
COLLECTIONS = ("callbacks", "logger")  # each is a mapping of objects; null is none
# Values that train.py replaces before the Trainer sees them.
AUTO = {"trainer.precision": "auto", "trainer.enable_progress_bar": "auto"}


class UserError(CompactHydraException):
    """A mistake in the command: Hydra prints its sentence, and no trace."""


class Rule(NamedTuple):
    """What the value of a key must be. A key in a group is checked only where it is set."""

    key: str
    holds: Callable[[Any], bool]
    must: str  # goes on after the key


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return re.fullmatch(r"[^/\\.][^/\\]{0,99}", str(value)) is not None and not isinstance(
        value, (bool, list, dict, types.NoneType)
    )


def _is_pattern(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, list) and bool(value))


def _maybe(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def _whole(key: str, least: int, *, maybe: bool = False) -> Rule:
    def holds(value: Any) -> bool:
        return _is_whole(value) and value >= least

    must = f"must be an integer >= {least}"
    return Rule(key, _maybe(holds), f"{must}, or null") if maybe else Rule(key, holds, must)


def _flag(key: str) -> Rule:
    return Rule(key, _is_bool, "must be true or false")


def _share(key: str, *, least: bool, most: bool, must: str) -> Rule:
    """A fraction; `least` and `most` say whether 0 and 1 are allowed."""

    def holds(value: Any) -> bool:
        return _is_number(value) and (
            0 < value < 1 or (least and value == 0) or (most and value == 1)
        )

    return Rule(key, holds, must)


NAME = "must be a name: at most 100 characters, without slashes, not beginning with a dot"
SEED = "must be from 0 to 4294967295"
POSITIVE = "must be a finite number above 0"
PATTERNS = "must be null, a pattern such as 'layer4.*', or a list of at least one pattern"

RULES = (
    Rule("seed", _is_whole, "must be an integer"),
    Rule("seed", lambda seed: 0 <= seed < 2**32, SEED),
    Rule(
        "gamma0",
        _maybe(_is_positive),
        "scales the norms' initial weights and must be a finite number above 0, or null",
    ),
    _flag("compile"),
    Rule("fuse", _maybe(_is_bool), "must be true, false or null"),
    _flag("recompute"),
    _flag("channels_last"),
    Rule("ckpt_path", _maybe(_is_text), "must be the path of a checkpoint, or null"),
    Rule("schedule", lambda value: value in SCHEDULES, f"must be one of {', '.join(SCHEDULES)}"),
    _share(
        "warmup",
        least=True,
        most=False,
        must="is a fraction of all steps, at least 0 and below 1",
    ),
    _share("label_smoothing", least=True, most=True, must="must be a number from 0 to 1"),
    Rule("study", _is_name, NAME),
    Rule("tag", _maybe(lambda tag: tag == "" or _is_name(tag)), f"{NAME}; or null"),
    Rule("swap.include", _maybe(_is_pattern), PATTERNS),
    Rule("swap.exclude", _maybe(_is_pattern), PATTERNS),
    Rule("data.seed", _is_whole, "must be an integer"),
    Rule("data.seed", lambda seed: 0 <= seed < 2**32, SEED),
    _whole("data.batch_size", 1),
    _whole("data.image_size", 1, maybe=True),
    _whole("data.num_classes", 2),
    _whole("data.num_images", 1),
    _whole("data.num_workers", 0),
    Rule("data.memory_gib", lambda x: _is_number(x) and x >= 0, "must be a finite number >= 0"),
    _share("data.val_fraction", least=False, most=False, must="must be above 0 and below 1"),
    _whole("data.augment.pad", 0),
    _flag("data.augment.flip"),
    Rule("optimizer.lr", _is_positive, POSITIVE),
    _whole("model.patch_size", 1, maybe=True),
    _whole("model.hidden_dim", 1),
    _whole("model.depth", 1),
    _whole("model.heads", 1),
    _whole("model.mlp_ratio", 1),
    _share("model.dropout", least=True, most=False, must="must be at least 0 and below 1"),
    _whole("trainer.log_every_n_steps", 0),
    _whole("trainer.num_sanity_val_steps", -1),
    _whole("trainer.accumulate_grad_batches", 1),
    _whole("trainer.check_val_every_n_epoch", 1, maybe=True),
    Rule(
        "trainer.max_steps",
        lambda steps: _is_whole(steps) and (steps == -1 or steps >= 1),
        "must be an integer >= 1, or -1 for no limit",
    ),
    Rule(
        "trainer.gradient_clip_val",
        _maybe(lambda norm: _is_number(norm) and norm >= 0),
        "must be a finite number >= 0, or null",
    ),
    Rule(
        "trainer.val_check_interval",
        lambda value: not isinstance(value, (int, float)) or _is_positive(value),
        "must be above 0, a time, or null",
    ),
    Rule("trainer.limit_train_batches", _maybe(_is_positive), f"{POSITIVE}, or null"),
    Rule("trainer.limit_test_batches", _maybe(_is_positive), f"{POSITIVE}, or null"),
)


def check(cfg: DictConfig) -> None:
    """Refuse a configuration that cannot run, or would run without the effect that it asks for.

    Args:
        cfg: the composed configuration. It is not changed.

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
    for group in BUILT:
        _check_node(group, values[group])
    for group in COLLECTIONS:
        for name, node in (values.get(group) or {}).items():
            if node is not None:
                _check_node(f"{group}.{name}", node)
    _check_optimizer(cfg)


def building_sentence(error: InstantiationException, overrides: Iterable[str] = ()) -> str:
    """Put the failure of a configured object's constructor into one sentence.

    Args:
        error: what `hydra.utils.instantiate` raised.
        overrides: of the command; those of the failing group are shown.
    """
    key = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
    where = key[1] if key else "an object of the configuration"
    cause = error.__cause__ or error
    group = where.split(".")[0]
    given = [text for text in overrides if re.match(rf"[+~]*{re.escape(group)}[.=]", text)]
    got = f"; the command gives {', '.join(given)}" if given else ""
    return f"{WHO}: {where} cannot be built: {_line(cause)}{got}. Change the keys of {group}."


def groups_off(arguments: Sequence[str], configs: str) -> list[str]:
    """Rewrite `GROUP=null`, which Hydra refuses with a trace, as `GROUP=[]`, which it takes.

    Args:
        arguments: of the command line.
        configs: the directory whose subdirectories are the groups.
    """
    groups = "|".join(re.escape(path.name) for path in Path(configs).iterdir() if path.is_dir())
    override = re.compile(rf"(?:{groups})=")
    null = re.compile(r"(?<=[=,])null(?=,|$)")
    return [null.sub("[]", text) if override.match(text) else text for text in arguments]


def accept_null_groups(configs: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a Hydra application so that its command line takes `GROUP=null`."""

    def decorate(application: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(application)
        def started(*arguments: Any) -> Any:
            sys.argv[1:] = groups_off(sys.argv[1:], configs)
            return application(*arguments)

        return started

    return decorate


def _check_keys(values: Mapping[str, Any]) -> None:
    single = {rule.key for rule in RULES if "." not in rule.key} | {"mode", "swap"}
    for key in sorted(values.keys() - single - {*BUILT, *COLLECTIONS}):
        raise UserError(
            f"{WHO}: {key} is not a key of the configuration. "
            f"{_instead(key, single | {*BUILT, *COLLECTIONS})}"
        )
    for key in (*sorted(single), *BUILT):
        if key not in values:
            raise UserError(f"{WHO}: the configuration needs {key}, and has none. {SEE_HELP}")
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
    if _is_whole(epochs) and epochs >= 1:
        return
    if steps >= 1 and (epochs is None or (_is_whole(epochs) and epochs == -1)):
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
    matrix, vector = torch.nn.Parameter(torch.zeros(1, 1)), torch.nn.Parameter(torch.zeros(1))
    groups = [{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}]
    try:
        instantiate(cfg.optimizer, _convert_="all")(groups)
    except Exception as error:  # each optimizer has its own
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        settings = cast(dict[str, Any], OmegaConf.to_container(cfg.optimizer, resolve=True))
        given = ", ".join(f"{k}={shown(v)}" for k, v in settings.items() if k[:1] != "_")
        raise UserError(
            f"{WHO}: {cfg.optimizer._target_} refuses its settings: {_line(cause or error)}; "
            f"got {given}. Change optimizer.*."
        ) from None


def _check_node(key: str, node: Any) -> None:
    """Check a mapping with a `_target_`, and the mappings inside it."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise UserError(
            f"{WHO}: {key} must be a mapping with a _target_; got {shown(node)}. Choose a file of "
            f"configs/{key.split('.')[0]}, or name the class in {key}._target_."
        )
    try:
        target = get_object(str(node["_target_"]))
    except Exception as error:  # what the import of any module may raise
        raise UserError(
            f"{WHO}: {key}._target_ must be the import path of a class or function; "
            f"got {node['_target_']!r} ({_line(error)})."
        ) from None
    _check_target(key, node, target)
    for name, value in node.items():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict) and "_target_" in inner:
                _check_node(f"{key}.{name}", inner)


def _check_target(key: str, node: Mapping[str, Any], target: Any) -> None:
    """Check the names and the types of the arguments that `node` gives to `target`."""
    handed = HANDED.get(key, {})
    given = {name: value for name, value in node.items() if name[:1] != "_"}
    for name, home in handed.items():
        if name in given:
            raise UserError(f"{WHO}: {key}.{name} comes from {home}. Leave {key}.{name} out.")
    signature = signature_of(target)
    if signature is None:
        return
    for name in given:
        if name not in signature.hints and not signature.is_open:
            raise UserError(
                f"{WHO}: {key}.{name} is not an argument of "
                f"{node.get('_target_', f'normplug.{key}')}. "
                f"{_instead(name, signature.hints.keys() - handed.keys(), f'{key}.')}"
            )
    lacking = signature.required - given.keys() - handed.keys()
    if lacking and not {"_args_", "_partial_"} & node.keys():
        raise UserError(
            f"{WHO}: {key} needs {', '.join(sorted(lacking))} for {node['_target_']}. "
            f"Give +{key}.{min(lacking)}=VALUE."
        )
    for name, value in given.items():
        hint = signature.hints.get(name, Any)
        if name in signature.defaults and value == signature.defaults[name]:
            continue
        if not accepts(hint, value) and (f"{key}.{name}", value) not in AUTO.items():
            raise UserError(f"{WHO}: {key}.{name} must be {described(hint)}; got {shown(value)}.")


def _instead(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The way out for a name that is not known."""
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


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".!")
