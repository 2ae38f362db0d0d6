"""How a norm joins the batches of a group of processes: inside its kernels, or by collectives.

The kernels exchange statistics through memory that the GPUs of a host share: see
`normplug._kernels.batch_norm.exchange`. All processes of a group agree once, at their first call,
whether they can. If not, `normplug.status()` says why, and each call sends collectives.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from normplug import _checks
from normplug._ops import can_run
from normplug._torch import group_of_name, symmetric_memory

NO_SECOND_DERIVATIVE = (
    "normplug.SyncBatchNorm: over several processes its gradient cannot be differentiated again. "
    "Omit create_graph=True, or train without sync=True."
)
_MOST_PROCESSES = 16
_TIMEOUT = timedelta(minutes=10)  # of a group without one


class _Turn:
    """Which stream of a device has the latest exchange.

    Exchanges run one after another, in the order of their calls, also on several streams and in
    several groups. Otherwise two kernels could count the exchanges of a channel at once. Or kernels
    of two streams could fill two processes' GPUs in different orders, and wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.zeros(1, dtype=torch.int64)
        self.address = self._stream.data_ptr()  # for the host path in C++

    def pass_to(self, stream: int) -> None:
        """Make `stream`, the current one, wait for the exchanges on the latest one."""
        latest = int(self._stream)
        if stream == latest:
            return
        self._stream.fill_(stream)
        other = torch.cuda.default_stream(self._device)
        captured = False
        if latest:  # CUDA forbids a query of the default stream during a capture
            other = torch.cuda.ExternalStream(latest, self._device)
            with torch.cuda.stream(other):
                captured = torch.cuda.is_current_stream_capturing()
        # A stream inside a CUDA graph's capture and a stream outside cannot wait for each other.
        if captured == torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_stream(other)


_turns: dict[torch.device, _Turn] = {}


class Peers:
    """What the kernels of one process need to join the batches of a group.

    inboxes: the addresses of all processes' inboxes, zeros at first, in the order of the ranks.
    timeout: seconds after which a wait for another process fails. keep: what owns the addresses.
    """

    def __init__(
        self,
        rank: int,
        inboxes: Sequence[int],
        device: torch.device,
        timeout: float,
        keep: Any,
    ) -> None:
        from normplug._kernels.batch_norm.exchange import table

        self.world = len(inboxes)
        self._rank, self._timeout, self._keep = rank, timeout, keep
        self._mark = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.mark = self._mark.data_ptr()
        words = table(rank, inboxes, self.mark, timeout)
        self._table = torch.tensor(words, dtype=torch.int64).to(device)
        self.table = self._table.data_ptr()
        self._turn = _turns.setdefault(device, _Turn(device))
        self.turn = self._turn.address

    def take_turn(self, stream: int) -> None:
        """`check`, then prepare a launch on the current stream; stream: its handle."""
        self.check()
        self._turn.pass_to(stream)

    def check(self) -> None:
        """Raise a RuntimeError if a kernel has stopped waiting for another process."""
        mark = int(self._mark)
        if mark:
            first, tag = mark >> 32, mark & 0xFFFFFFFF
            direction = "backward" if tag & 2 else "forward"
            raise RuntimeError(
                f"normplug.SyncBatchNorm: rank {self._rank} of {self.world} has waited "
                f"{self._timeout:.0f} s for rank {first} in the {direction} of a layer of "
                f"{tag >> 2} channels, and its results from then on are nan. All ranks of the "
                "group must call the same layers in the same order. Check whether that rank has "
                "stopped, has skipped the layer, or is slower than the group's timeout."
            )


class Join(NamedTuple):
    """How a layer joins the batches of a group of processes.

    backend: of the layer. peers: None if it sends collectives.
    """

    group: Any
    backend: str
    peers: Peers | None


# A spec and an operator have the number of a join, an index into this list; 0 for one process.
joins: list[Any] = [None]
_numbers: dict[tuple[Any, torch.device, str], int] = {}


def group_to_join(group: Any) -> Any:
    """`group`, or all processes if it is None; None if there is no other process to join."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def number_of(group: Any, device: torch.device, backend: str) -> int:
    """The number of the join of a group. The first call may wait for all its processes."""
    if torch.compiler.is_compiling():
        return _number_of_name(group.group_name, device, backend)
    return _number_of(group, device, backend)


def _number_of(group: Any, device: torch.device, backend: str) -> int:
    key = group, device, backend
    number = _numbers.get(key)
    if number is None:
        chosen = _checks.backend("SyncBatchNorm", backend)
        asked = chosen == "triton" or (chosen == "auto" and device.type == "cuda")
        joins.append(Join(group, backend, of(group, device) if asked else None))
        number = _numbers[key] = len(joins) - 1
    return number


def _number_of_name(name: str, device: torch.device, backend: str) -> int:
    return _number_of(group_of_name(name), device, backend)


def peers_of(number: int) -> Peers | None:
    """The peers of a join; None for one process, and if it sends collectives."""
    return joins[number].peers if number else None


def most_channels(number: int) -> int:
    """The most channels of a layer whose statistics the kernels exchange; 0 if they never do."""
    if peers_of(number) is None:
        return 0
    from normplug._kernels.batch_norm.exchange import CHANNELS

    return CHANNELS.value


# What `torch.compiler.assume_constant_result` does, which would import the whole compiler.
_number_of_name._dynamo_marked_constant = True  # type: ignore[attr-defined]
most_channels._dynamo_marked_constant = True  # type: ignore[attr-defined]

_agreed: dict[tuple[Any, torch.device], Peers | None] = {}
groups: list[str] = []  # how each group joins its batches, for `normplug.status`


def of(group: Any, device: torch.device) -> Peers | None:
    """The peers in a group of several processes; None if it uses collectives.

    The first call waits for all processes.
    """
    if (group, device) not in _agreed:
        peers, why = _agree(group, device)
        way = "inside the kernels" if peers else f"collectives, because {why}"
        groups.append(f"{group.size()} processes: {way}")
        _agreed[group, device] = peers
    return _agreed[group, device]


def _agree(group: Any, device: torch.device) -> tuple[Peers | None, str]:
    """The peers, or None and why there are none; all processes get the same."""
    if device.type != "cuda":
        return None, f"the tensors are on {device.type}"
    if dist.get_backend(group) == "gloo":
        return None, "the group's backend is gloo"
    facts = (_host(), str(torch.cuda.get_device_properties(device).uuid))
    facts_of_all = _gather(group, (_refusal(group), *facts))
    why = next((each for each, *_ in facts_of_all if each), None) or _apart(
        facts_of_all, device
    )
    peers = None
    if not any(_gather(group, why)):
        try:
            peers = _connect(group, device)
        except Exception as error:  # private code of torch may raise any type
            why = f"symmetric memory failed on rank {group.rank()}: {error}"
        why = next(filter(None, _gather(group, why)), None)
    if peers is None or why:
        return None, why or "another rank refused"
    return peers, ""


def _refusal(group: Any) -> str | None:
    """Why the kernels of this process cannot join the group; None if they can."""
    why = can_run.refusal_now()
    if why is not None:
        return why
    from normplug._kernels.launch import BUILDS, INTERPRETED

    if INTERPRETED or not BUILDS:
        return "kernels do not run on this Triton"
    if symmetric_memory() is None:
        return f"torch {torch.__version__} has no symmetric memory"
    if group.size() > _MOST_PROCESSES:
        return f"there are more than {_MOST_PROCESSES} processes"
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        # A waiting kernel would hold up the collectives that another process waits for.
        return "CUDA_DEVICE_MAX_CONNECTIONS is 1"
    return None


def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


def _apart(facts: list[Any], device: torch.device) -> str | None:
    """Why the GPUs of the processes cannot share memory; None if they may."""
    _, hosts, gpus = zip(*facts, strict=True)
    if len(set(hosts)) > 1:
        return "the group spans several hosts"
    if len(set(gpus)) < len(gpus):
        return "two processes use one GPU"
    for other in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(other).uuid)
        is_peer = other != device.index and uuid in gpus
        if is_peer and not torch.cuda.can_device_access_peer(device, other):
            return f"{device} cannot read the memory of cuda:{other}"
    return None


def _gather(group: Any, value: Any) -> list[Any]:
    """The values of all processes."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _connect(group: Any, device: torch.device) -> Peers:
    from normplug._kernels.batch_norm.exchange import room

    memory = symmetric_memory()
    inbox = memory.empty(room(group.size()), dtype=torch.int64, device=device)
    inbox.zero_()
    handle = memory.rendezvous(inbox, group)
    shift = inbox.data_ptr() - handle.buffer_ptrs[group.rank()]
    if shift not in (0, getattr(handle, "offset", 0)):
        raise RuntimeError("its addresses are not as expected")
    inboxes = [address + shift for address in handle.buffer_ptrs]
    options = getattr(group._get_backend(device), "options", None)
    # Before the collectives time out, which may end the process without our error.
    timeout = 0.9 * getattr(options, "_timeout", _TIMEOUT).total_seconds()
    peers = Peers(group.rank(), inboxes, device, timeout, (inbox, handle))
    torch.cuda.synchronize(device)
    return peers
