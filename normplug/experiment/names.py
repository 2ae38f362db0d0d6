"""The names of arms, runs and directories, for Python and for `${normplug...}` in configs."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from omegaconf import OmegaConf

import normplug
from normplug._report.arms import BASELINE
from normplug._swap.depth import ByDepth, Schedule

LONGEST_NAME = 180  # bytes; file systems allow 255


def mean_inverse_depth(block: int, blocks: int) -> float:
    """The mean of 1/l over all blocks, the same in each: "1/l" without its dependence on depth."""
    return sum(1.0 / (number + 1) for number in range(blocks)) / blocks


# Modes that set a target variance per layer: the values of `mode`, and their schedules.
SCHEDULES: dict[str, str | Schedule] = {
    "inverse_depth": "1/l",
    "reversed_depth": "reversed",
    "mean_inverse_depth": mean_inverse_depth,
}


def mode_of(mode: str | float) -> normplug.NormMode | ByDepth:
    """Convert a value of the key `mode` to a mode of `normplug.swap`.

    Raises:
        ValueError: it is neither a mode nor one of `SCHEDULES`.
    """
    if isinstance(mode, str) and mode in SCHEDULES:
        return normplug.by_depth(SCHEDULES[mode])
    return normplug.NormMode(mode)


def arm_name(
    mode: str | float,
    gamma0: float | str | None = None,
    tag: str | None = None,
    autocast_output: str | None = None,
) -> str:
    """Return the arm's name in directories, results and tables.

    Args:
        mode: "baseline", one of `SCHEDULES`, or "golden", "standard" or a number.
        gamma0: in the name if it is not None, e.g. `standard-gamma0_0.786` or
            `standard-gamma0_inverse_depth`.
        tag: the last part of the name, if it is neither None nor "".
        autocast_output: of `normplug.swap`, in the name unless it is that function's default "low"
            or the arm is not swapped, e.g. `standard-autocast_float32`.

    Raises:
        ValueError: unknown mode.
        TypeError: a mode that is neither text nor a number.
    """
    parts = [mode if mode in (BASELINE, *SCHEDULES) else str(normplug.NormMode(mode))]
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
