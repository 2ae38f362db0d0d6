"""Compile kernels in other processes before they are needed.

Without this, the first step compiles its kernels one after another, each in one to four seconds.
But when a forward is set up, its backward's kernel is already known, so a worker can compile it in
the meantime. The result goes to Triton's cache on disk, where this process finds it.

A worker process runs `ahead_worker`. A thread of this process starts it and sends it one kernel at
a time, as a `concurrent.futures.Future`. The pools of the standard library would import the user's
script in every worker, and would finish all waiting kernels before this process can exit. A worker
exits with this process, or once it is idle. If it fails, this process compiles the kernel itself.
If the logger `normplug` is set to DEBUG before a worker starts, its tracebacks go to stderr.

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
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent import futures
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton

from normplug import native
from normplug._kernels import ahead_worker

_log = logging.getLogger("normplug")
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Whether a kernel's key in Triton's cache can be computed, and workers can be forked.
KEYED = _VERSION >= (3, 5) and sys.platform == "linux"
_PATIENCE = 60.0  # seconds to wait for a worker that has started
_IDLE = 60.0  # seconds without a job after which a worker exits
_MOST = 15  # workers


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


class Workers:
    """Threads that each have a process compile jobs, in the order in which they were submitted."""

    def __init__(self, most: int) -> None:
        self.have_answered = False  # whether any process has ever run a job to its end
        self._most = most
        self._ended = False
        self._jobs: queue.SimpleQueue[tuple[futures.Future[bool], tuple[Any, ...]]]
        self._jobs = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes] | None] = []  # one for each thread

    def submit(self, job: Job) -> futures.Future[bool]:
        """Have a job compiled; the result is whether a worker did that."""
        future: futures.Future[bool] = futures.Future()
        on = triton.runtime.driver.active.get_current_target()
        target = (on.backend, on.arch, on.warp_size)
        name = (job.kernel.__module__, job.kernel.__name__, job.kernel.cache_key)
        self._jobs.put((future, (*name, job[1:4], job.options, target)))
        if len(self._processes) < self._most:
            self._processes.append(None)
            place = len(self._processes) - 1
            threading.Thread(target=self._work, args=(place,), daemon=True).start()
        return future

    def end(self) -> None:
        """Kill the processes, and start no more jobs."""
        self._ended = True
        for process in self._processes:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _work(self, place: int) -> None:
        while True:
            try:
                patience = None if self._processes[place] is None else _IDLE
                future, arguments = self._jobs.get(timeout=patience)
            except queue.Empty:
                self._stop(place)
                continue
            if self._ended or not future.set_running_or_notify_cancel():
                continue
            try:
                process = self._processes[place] = self._processes[place] or _started()
                assert process.stdin is not None
                assert process.stdout is not None
                pickle.dump(arguments, process.stdin)
                process.stdin.flush()
                has_compiled: bool = pickle.load(process.stdout)
                self.have_answered = True
            except Exception:  # the process cannot start, or has ended
                self._stop(place)
                has_compiled = False
            future.set_result(has_compiled)

    def _stop(self, place: int) -> None:
        process, self._processes[place] = self._processes[place], None
        if process is not None:
            with contextlib.suppress(OSError), process:  # closes the pipes, and waits
                pass


def _started() -> subprocess.Popen[bytes]:
    package = Path(__file__).parent.parent
    start = pickle.dumps((str(package), sys.path, kernel_modules()))
    return subprocess.Popen(
        [sys.executable, "-I", ahead_worker.__file__, start.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        start_new_session=True,  # Ctrl+C must not reach it, and `end` kills its process group
    )


class Ahead:
    """The kernels that this process needs compiled; there is one instance per process."""

    def __init__(self) -> None:
        # Kernels by origin: compiled here, compiled by a worker, found in Triton's cache.
        self.counts = {"here": 0, "workers": 0, "cache": 0}
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._workers: Workers | None = None
        self._off = not KEYED
        self._submitted: dict[str, futures.Future[bool]] = {}  # by job
        self._kept: set[str] = set()  # jobs whose kernel was in Triton's cache
        self._settled: dict[str, str | None] = {}  # by job: the kernel's key in Triton's cache
        self._met_nothing: bool | None = None  # whether the cache was empty at the first job

    def expect(self, job: Job) -> bool:
        """Have a worker compile a kernel that will be launched later.

        Returns:
            Whether a worker has yet to compile it. False if it is compiled, or if there is none.
        """
        with self._lock:
            key = job.key
            if self._is_off() or key in self._settled or key in self._kept:
                return False
            if self._met_nothing is None:
                self._met_nothing = _is_empty()
            if key not in self._submitted:
                # Computing a cache key takes time, and is unnecessary if the cache was empty.
                if not self._met_nothing and _is_kept(_name(job)):
                    self._kept.add(key)
                    return False
                if self._workers is None:
                    self._workers = Workers(most_workers())
                self._submitted[key] = self._workers.submit(job)
            return not self._submitted[key].done()

    def compile_now(self, jobs: Sequence[Job]) -> int:
        """Have workers compile kernels, and wait; return how many they have compiled."""
        new = [job.key for job in jobs if self.expect(job)]
        return sum(self._submitted[key].result() for key in new)

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
        by_worker = key in self._submitted and self._wait(self._submitted[key])
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
            if self._workers is not None and self._process == os.getpid():
                self._workers.end()
            self._workers = None

    def _is_off(self) -> bool:
        # The threads are not in a process that was forked from this one.
        return self._off or most_workers() == 0 or self._process != os.getpid()

    def _wait(self, future: futures.Future[bool]) -> bool:
        """Whether a worker compiled a kernel; wait for a started one, cancel a waiting one."""
        if self._process != os.getpid() or future.cancel():
            return False
        try:
            by_worker = future.result(_PATIENCE)
        except futures.TimeoutError:
            return False
        with self._lock:
            if self._workers is not None and not self._workers.have_answered:
                self.give_up()
        return by_worker


_ahead = Ahead()
expect, settle, give_up = _ahead.expect, _ahead.settle, _ahead.give_up
compile_now = _ahead.compile_now
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
