"""Compile kernels in other processes before they are needed.

Without this, the first step compiles its kernels one after another, each in one to four seconds.
But when a forward is set up, its backward's kernel is already known, so a worker can compile it in
the meantime. The result goes to Triton's cache on disk, where this process finds it.

The first kernel starts a process, the server, which runs `ahead_worker` and forks a worker for each
kernel. A thread of this process waits for the worker; the result is a `concurrent.futures.Future`.
The pools of the standard library would import the user's script in every worker, and would finish
all waiting kernels before this process can exit. If a worker fails, this process compiles the
kernel itself. If the logger `normplug` is set to DEBUG, the workers' tracebacks go to stderr.

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
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton

from normplug._kernels import ahead_worker
from normplug._kernels.primitives import VERSION

_log = logging.getLogger("normplug")
# Whether a kernel's key in Triton's cache can be computed, and workers can be forked.
KEYED = VERSION >= (3, 5) and sys.platform == "linux"
_PATIENCE = 60.0  # seconds to wait for a worker that has started
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
    """How many kernels to compile at once in other processes."""
    wanted = os.environ.get("NORMPLUG_COMPILE_WORKERS", "")
    if wanted and not wanted.isdecimal():
        raise ValueError(
            f"normplug: NORMPLUG_COMPILE_WORKERS must be a non-negative integer, not {wanted!r}. "
            "Set it to 0 to compile every kernel in this process, or unset it."
        )
    if wanted:
        return int(wanted)
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    processes = int(text) if text.isdecimal() else 1
    cores = len(os.sched_getaffinity(0)) // max(processes, 1)
    return min(max(cores - 1, 0), _MOST)


class Ahead:
    """The kernels that this process needs compiled; there is one instance per process."""

    def __init__(self) -> None:
        # Kernels by origin: compiled here, compiled by a worker, found in Triton's cache.
        self.counts = {"here": 0, "workers": 0, "cache": 0}
        self._process = os.getpid()
        self._off = not KEYED
        # By job: whether a worker compiles it; None if its kernel was in Triton's cache.
        self._expected: dict[str, futures.Future[bool] | None] = {}
        # By job: the kernel's key in Triton's cache.
        self._settled: dict[str, str | None] = {}
        # The argument types for which a worker builds a launcher.
        self._launchers: set[tuple[str, ...]] = set()
        self._queue: queue.SimpleQueue[tuple[futures.Future[bool], bytes]] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._to_server: socket.socket | None = None

    def expect(self, job: Job) -> bool:
        """Have a worker compile a kernel that will be launched later; False if it need not."""
        key = job.key
        # A process that was forked from this one does not have its threads.
        is_off = self._off or most_workers() == 0 or self._process != os.getpid()
        if is_off or key in self._settled:
            return False
        if key not in self._expected:  # at worst, two threads submit one job twice
            self._expected[key] = None if _is_kept(_name(job)) else self._submit(job)
        future = self._expected[key]
        return future is not None and not future.done()

    def settle(self, job: Job) -> str | None:
        """Wait for a kernel if a worker is compiling it; called before its first launch.

        It returns the kernel's key in Triton's cache, or None if that is unknown.
        """
        key = job.key
        if key in self._settled:
            return self._settled[key]
        name = self._settled[key] = _name(job) if KEYED else None
        by_worker, future = False, self._expected.get(key)
        # If no worker has started, this process compiles the kernel, and cancels the job.
        if future is not None and self._process == os.getpid() and not future.cancel():
            with contextlib.suppress(futures.TimeoutError):
                by_worker = future.result(_PATIENCE)
                if not by_worker and self.counts["workers"] == 0:
                    self.stop()  # perhaps no worker can compile
        if name is not None and _is_kept(name):
            self.counts["workers" if by_worker else "cache"] += 1
        else:
            self.counts["here"] += 1
        return name

    def start(self) -> None:
        """Start the server, which takes seconds to import Triton, before its first kernel."""
        output = None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL
        package = str(Path(__file__).parent.parent)
        command = [sys.executable, "-I", str(ahead_worker.__file__), package, *sys.path]
        with self._lock:
            if self._to_server is not None or self._off:
                return
            self._to_server, its = socket.socketpair()
            with its, contextlib.suppress(OSError):
                # In a new session, Ctrl+C does not reach it, and `stop` kills its workers, too.
                self._server = subprocess.Popen(
                    command, start_new_session=True,
                    stdin=its.fileno(), stdout=output, stderr=output,
                )  # fmt: skip

    def stop(self) -> None:
        """Kill the workers, and compile everything in this process from now on."""
        self._off = True
        if self._to_server is not None:
            self._to_server.close()
        if self._server is not None and self._process == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def _submit(self, job: Job) -> futures.Future[bool]:
        future: futures.Future[bool] = futures.Future()
        on = triton.runtime.driver.active.get_current_target()
        keys = triton.runtime.cache.triton_key(), job.kernel.cache_key
        name = f"{job.kernel.__module__}.{job.kernel.__name__}"
        target = on.backend, on.arch, on.warp_size
        types = tuple(job.signature.values())
        work = name, keys, job[1:4], job.options, target, types not in self._launchers
        self._launchers.add(types)
        self._queue.put((future, pickle.dumps(work)))
        self.start()
        if len(self._threads) < most_workers():
            thread = _started(self._run_jobs)
            if thread is not None:
                self._threads.append(thread)
        return future

    def _run_jobs(self) -> None:
        while True:
            future, job = self._queue.get()
            if future.set_running_or_notify_cancel():
                future.set_result(not self._off and self._is_compiled(job))

    def _is_compiled(self, job: bytes) -> bool:
        """Have a worker compile a kernel; return whether it has."""
        assert self._to_server is not None
        mine, its = socket.socketpair()
        with mine, contextlib.suppress(OSError):  # there is no server
            with its:
                socket.send_fds(self._to_server, [b"\0"], [its.fileno()])
            mine.sendall(job)
            return mine.recv(1) == ahead_worker.DONE
        return False


_ahead = Ahead()
expect = _ahead.expect
settle = _ahead.settle
stop = _ahead.stop
counts = _ahead.counts
atexit.register(stop)


def _started(target: Callable[[], Any]) -> threading.Thread | None:
    """Start a thread; None after the main thread has ended, when Python 3.12 starts none."""
    thread = threading.Thread(target=target, daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
        return thread
    return None


def _name(job: Job) -> str:
    """Compute a kernel's key in Triton's cache."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource, get_cache_key, make_backend

    # Hash Triton while the driver may compile C code.
    hashing = _started(triton.runtime.cache.triton_key)
    backend = make_backend(triton.runtime.driver.active.get_current_target())
    if hashing is not None:
        hashing.join()
    source, options = ASTSource(*job[:4]), backend.parse_options(dict(job.options))
    key = get_cache_key(
        source, backend, options, env_vars=get_cache_invalidating_env_vars()
    )
    return hashlib.sha256(key.encode()).hexdigest()


def _is_kept(name: str) -> bool:
    """Whether Triton's cache has the kernel of this key."""
    from triton.runtime.cache import get_cache_manager

    directory = getattr(get_cache_manager(name), "cache_dir", None)
    return directory is not None and any(Path(directory).glob("__grp__*"))
