"""Compile kernels in other processes before they are needed.

Without this, the first step compiles its kernels one after another, each in one to four seconds.
But when a forward is set up, its backward's kernel is already known, so a worker can compile it in
the meantime. The result goes to Triton's cache on disk, where this process finds it.

`ahead_server` runs in a process of its own, the server, which forks the workers. It starts when a
needed kernel is not in the cache. It exits with this process, or once it is idle. If it fails, this
process compiles the kernels itself. If the logger `normplug` is set to DEBUG before the server
starts, tracebacks of the server and its workers go to stderr.

The environment variable `NORMPLUG_COMPILE_WORKERS` sets how many kernels are compiled at once; 0
disables the workers. The default is one less than the number of cores, at most 15. Under torchrun,
the processes of a node share its cores.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton

from normplug import native
from normplug._kernels import ahead_server

_log = logging.getLogger("normplug")
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Whether a kernel's key in Triton's cache can be computed, and workers can be forked.
KEYED = _VERSION >= (3, 5) and sys.platform == "linux"
_PATIENCE = 60.0  # seconds to wait for a worker that has started
_MOST = 15  # workers
_PIPE_BYTES = 1 << 20  # for jobs, of 1 to 2 kB each, that are sent while the server still starts


class Job(NamedTuple):
    """A kernel to compile: arguments of `triton.compiler.ASTSource`, and the compiler's options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], Any]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """A string that identifies the job in this process."""
        return f"{self.kernel.__module__}.{self.kernel.__name__}{self[1:]}"


@cache
def most_workers() -> int:
    """How many kernels to compile at once in other processes.

    Raises:
        ValueError: `NORMPLUG_COMPILE_WORKERS` is not an integer, or below 0.
    """
    wanted = os.environ.get("NORMPLUG_COMPILE_WORKERS", "")
    if wanted and not wanted.isdecimal():
        raise ValueError(
            f"normplug: NORMPLUG_COMPILE_WORKERS must be a non-negative integer, not {wanted!r}. "
            "Set it to 0 to compile every kernel in this process, or unset it."
        )
    if wanted:
        return int(wanted)
    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0)) // max(int(beside) if beside.isdecimal() else 1, 1)
    return min(max(cores - 1, 0), _MOST)


def kernel_modules() -> list[str]:
    """Return the names of the imported modules that define kernels: these need no torch."""
    return [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("normplug._kernels.")
        and any(isinstance(each, triton.JITFunction) for each in vars(module).values())
    ]


class Server:
    """The client of a server process, and the states of the jobs sent to it."""

    def __init__(self, workers: int) -> None:
        import fcntl  # not on Windows, where there is no server

        package = Path(__file__).parent.parent
        start = (workers, str(package), sys.path, kernel_modules())
        self.states: dict[int, str] = {}  # job number -> waiting, started, done or failed
        self._sent = 0  # jobs so far, of kernels and launchers: the number of the next
        self._launched: set[tuple[Any, ...]] = set()  # kernels and signatures sent for a launcher
        self._said = b""  # the beginning of a line that has not arrived in full
        self._process = subprocess.Popen(
            [sys.executable, "-I", ahead_server.__file__, pickle.dumps(start).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl+C must not reach it, and `end` kills its process group
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        with contextlib.suppress(OSError):  # the user's pipes are at their limit
            fcntl.fcntl(self._jobs, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._jobs, False)
        os.set_blocking(self._answers, False)

    def take(self, job: Job) -> int | None:
        """Send a job, after one for its launcher if that is new; return its number, or None."""
        name = (job.kernel.__module__, job.kernel.__name__)
        launched = (*name, *job.signature.items())
        is_new = launched not in self._launched
        if is_new and self._send("launcher", (*name, job[1:4])) is not None:
            self._launched.add(launched)
        on = triton.runtime.driver.active.get_current_target()
        target = (on.backend, on.arch, on.warp_size)
        key = job.kernel.cache_key
        number = self._send("kernel", (*name, key, job[1:4], job.options, target))
        if number is not None:
            self.states[number] = "waiting"
        return number

    def _send(self, task: str, arguments: tuple[Any, ...]) -> int | None:
        if not self._tell(pickle.dumps((task, arguments))):
            return None
        self._sent += 1
        return self._sent - 1

    def drop(self, number: int) -> None:
        """Withdraw a job, unless it has started."""
        self._tell(number.to_bytes(ahead_server.SHORT, "little"))

    def _tell(self, data: bytes) -> bool:
        data = len(data).to_bytes(4, "little") + data
        if len(data) > select.PIPE_BUF:  # a longer write is not atomic
            return False
        try:
            return os.write(self._jobs, data) > 0
        except OSError:
            return False

    def listen(self, seconds: float = 0.0) -> bool:
        """Update states from the server's lines; wait for one at most `seconds`.

        Returns:
            False once the server has exited.
        """
        if select.select([self._answers], [], [], seconds)[0]:
            more = os.read(self._answers, 1 << 16)
            if not more:
                return False
            *lines, self._said = (self._said + more).split(b"\n")
            for line in lines:
                state, number = line.decode().split()
                if int(number) in self.states:
                    self.states[int(number)] = state
        return True

    def end(self) -> None:
        """Kill the server and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:  # closes the pipes, and waits
            pass


class Ahead:
    """The kernels that this process needs compiled; there is one instance per process."""

    def __init__(self) -> None:
        # Kernels by origin: compiled here, compiled by a worker, found in Triton's cache.
        self.counts = {"here": 0, "workers": 0, "cache": 0}
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._server: Server | None = None
        self._off = not KEYED
        self._given: dict[str, tuple[Server, int]] = {}  # by job: its server and number
        self._kept: set[str] = set()  # jobs whose kernel was in Triton's cache
        self._settled: dict[str, str | None] = {}  # by job: the kernel's key in Triton's cache
        self._met_nothing: bool | None = None  # whether the cache was empty at the first job

    def expect(self, job: Job) -> bool:
        """Have a worker compile a kernel that will be launched later.

        Returns:
            Whether it is left to a worker. False if it is compiled already, or if none can take it.
        """
        with self._lock:
            key = job.key
            if self._is_off() or key in self._settled or key in self._kept:
                return False
            if self._met_nothing is None:
                self._met_nothing = _is_empty()
            if key not in self._given:
                # Computing a cache key takes time, and is unnecessary if the cache was empty.
                if not self._met_nothing and _is_kept(_name(job)):
                    self._kept.add(key)
                    return False
                if (server := self._started()) is None:
                    return False
                if (number := server.take(job)) is None:
                    return False
                self._given[key] = server, number
            return True

    def settle(self, job: Job) -> str | None:
        """Wait for a kernel if a worker is compiling it; called before its first launch.

        Returns:
            The kernel's key in Triton's cache; None if that is unknown.
        """
        with self._lock:
            key = job.key
            if key in self._settled:
                return self._settled[key]
            name = self._settled[key] = _name(job) if KEYED else None
        by_worker = key in self._given and self._wait(*self._given[key])
        if name is not None and _is_kept(name):
            self.counts["workers" if by_worker else "cache"] += 1
        else:
            self.counts["here"] += 1
        return name

    def give_up(self) -> None:
        """Stop the workers, and compile everything in this process from now on."""
        with self._lock:
            self._off = True
            self.end()

    def end(self) -> None:
        """Stop the workers."""
        with self._lock:
            if self._server is not None and self._process == os.getpid():
                self._server.end()
            self._server = None

    def _is_off(self) -> bool:
        # A process forked from this one must not talk to its server.
        return self._off or most_workers() == 0 or self._process != os.getpid()

    def _started(self) -> Server | None:
        """The server, started if necessary; None if there can be none."""
        if self._is_off():
            return None
        if self._server is not None and not self._server.listen():
            self._off = "done" not in self._server.states.values()  # no job has ever succeeded
            self.end()
            return self._started()
        if self._server is None:
            try:
                self._server = Server(most_workers())
            except OSError:
                self._off = True
        return self._server

    def _wait(self, server: Server, number: int) -> bool:
        """Whether a worker compiled a kernel; wait for a started job, withdraw a waiting one."""
        end = time.monotonic() + _PATIENCE
        while self._process == os.getpid() and time.monotonic() < end:
            with self._lock:
                alive = server is self._server and server.listen(0.002)
                state = server.states[number]
                if alive and state == "waiting":
                    server.drop(number)
            if state != "started" or not alive:
                return state == "done"
        return False


_ahead = Ahead()
expect, settle, give_up = _ahead.expect, _ahead.settle, _ahead.give_up
atexit.register(_ahead.end)
native.counts_in(_ahead.counts)


def _unlock() -> None:
    """Replace the lock in a child process: a thread that holds it has no copy there."""
    _ahead._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def _name(job: Job) -> str:
    """Compute a kernel's key in Triton's cache."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource, get_cache_key, make_backend

    backend = make_backend(triton.runtime.driver.active.get_current_target())
    source, options = ASTSource(*job[:4]), backend.parse_options(dict(job.options))
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def _is_empty() -> bool:
    """Whether Triton's cache is a directory that is empty or does not exist yet."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    if knobs.cache.manager_class not in (None, FileCacheManager):
        return False
    directory = Path(knobs.cache.dir)
    return not directory.exists() or not any(directory.iterdir())


def _is_kept(name: str) -> bool:
    """Whether Triton's cache has the kernel of this key."""
    from triton.runtime.cache import get_cache_manager

    directory = getattr(get_cache_manager(name), "cache_dir", None)
    return directory is not None and any(Path(directory).glob("__grp__*"))
