"""What this process runs: the host path, the joins of SyncBatchNorm, the origins of its kernels."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from normplug import native
from normplug._ops import exchange


class Status(NamedTuple):
    """What `status` returns, which describes the fields."""

    way: str
    why: str
    library: Path | None
    groups: tuple[str, ...] = ()
    kernels: Mapping[str, int] = MappingProxyType({})

    def __str__(self) -> str:
        line = str(native.HostPath(self.way, self.why, self.library))
        line += "".join(f" SyncBatchNorm of {group}." for group in self.groups)
        if not any(self.kernels.values()):
            return line
        here = self.kernels["here"]
        workers = self.kernels["workers"]
        cache = self.kernels["cache"]
        return (
            f"{line} Kernels: {here} compiled by this process, {workers} by its workers, {cache} "
            "from Triton's cache."
        )


def status() -> Status:
    """Return whether calls run through C++ or Python, why, and where the kernels came from.

    Returns:
        A named tuple, which prints as sentences. `way` is "C++" or "Python", `why` the reason, and
        `library` the compiled file or None. `groups` says how SyncBatchNorm joins the batches of
        each group of processes. `kernels` counts the kernels that this process has launched by
        their origin: "here", compiled by the process itself; "workers", by its worker processes;
        "cache", found in Triton's cache.
    """
    # Only a first kernel imports it, since it needs Triton.
    ahead = sys.modules.get("normplug._kernels.ahead")
    kernels = {} if ahead is None else dict(ahead.counts)
    return Status(*native.host_path(), tuple(exchange.groups), kernels)
