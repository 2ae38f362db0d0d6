"""Workers compile kernels into Triton's cache, and this process finds them there."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl
from triton.compiler import ASTSource, make_backend

from launches import (
    H100,
    JOIN,
    Driver,
    batch_norm_launches,
    group_norm_launches,
    pool_launches,
    row_launches,
)
from normplug._kernels import ahead, launch
from programs import wait_until

pytestmark = [
    pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(not ahead.KEYED, reason="workers need Triton 3.5 on Linux"),
]


@pytest.fixture(autouse=True)
def _a_gpu_and_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NORMPLUG_COMPILE_WORKERS", "1")
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    ahead.most_workers.cache_clear()
    yield
    ahead.most_workers.cache_clear()


@pytest.fixture
def mine():
    """Workers that only this test uses."""
    made = ahead.Ahead()
    yield made
    made.stop()


def dtypes_of(made):
    kinds = {"tracked": torch.int64, "counters": torch.int64, "bits": torch.uint8}
    return [kinds.get(name, torch.float32) for name in made.pointers]


ACTIVATIONS = [None, "relu", "silu"]


def a_job(activation=None):
    made, _ = batch_norm_launches(
        (64, 8, 1, True), torch.float32, False, activation=activation
    )
    return made.job(dtypes_of(made))


def expect(mine, count):
    """Request so many kernels from a worker; return their jobs."""
    jobs = [a_job(activation) for activation in ACTIVATIONS[:count]]
    for job in jobs:
        mine.expect(job)
    return jobs


def done(mine, job):
    return mine._expected[job.key].result(120)


def test_a_kernel_that_a_worker_compiled_is_found_in_the_cache(mine):
    jobs = {}  # a forward and a backward, which share functions
    for made in every_kernel(torch.float32):
        jobs.setdefault(made._kernel.__name__, made.job(dtypes_of(made)))
    for name in ("batch_norm_planes_forward", "batch_norm_planes_backward"):
        job = jobs[name]
        mine.expect(job)
        assert done(mine, job)
        mine.settle(job)
    assert mine.settle(job) is not None
    assert mine.counts == {"here": 0, "workers": 2, "cache": 0}
    again = ahead.Ahead()
    assert not again.expect(job)
    again.settle(job)
    assert again.counts == {"here": 0, "workers": 0, "cache": 1}


def test_a_job_that_no_worker_has_started_is_compiled_by_this_process(mine):
    jobs = expect(mine, 2)
    mine.settle(jobs[1])
    assert mine.counts == {"here": 1, "workers": 0, "cache": 0}
    last = a_job(ACTIVATIONS[2])
    mine.expect(last)
    assert done(mine, last)
    assert mine._expected[jobs[1].key].cancelled()


def every_kernel(dtype):
    """A launch of each kernel, some with 64-bit sizes."""
    joined = {"join": JOIN, "activation": "relu"}
    for channels_last in (False, True):
        for n in (64, 1 << 14):
            yield from batch_norm_launches(
                (n, 512, 400, channels_last), dtype, False, **joined
            )
        yield from group_norm_launches((1 << 14, 32, 10, 4096, channels_last), dtype)
    yield from pool_launches(dtype)
    for width in (768, 1 << 17):
        yield from row_launches(4096, width, dtype, width, residual=True, running=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_job_is_the_kernel_that_triton_compiles_for_the_call(dtype, monkeypatch):
    wanted = []

    def hashes(source, options, target=H100):
        options = make_backend(target).parse_options(dict(options))
        # The launcher's code follows the order of the signature.
        return source.hash(), options.hash(), [*source.signature.items()]

    def compile_nothing(source, target, options):
        wanted.append(hashes(source, options, target))

    kernels = set()
    for made in every_kernel(dtype):
        kernel = made._kernel
        kernels.add(kernel.__name__)
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
        kernel.device_caches[0]
        monkeypatch.setattr(kernel, "compile", compile_nothing)
        given = {"tracked": torch.int64, "counters": torch.int64}
        dtypes = [given.get(name, dtype) for name in made.pointers]
        names = [str(each).removeprefix("torch.") for each in dtypes]
        tensors = [triton.MockTensor(getattr(tl, name), [16]) for name in names]
        numbers = (*made._absent, *made._numbers)
        kernel.warmup(*tensors, *numbers, grid=(1,), **made._constants)
        job = made.job(dtypes)
        assert hashes(ASTSource(*job[:4]), job.options) == wanted[-1]
    assert len(kernels) == 14


def test_a_worker_that_fails_shows_why_and_changes_nothing(mine, caplog, capfd):
    caplog.set_level(logging.DEBUG, "normplug")
    (job,) = expect(mine, 1)
    broken = a_job(ACTIVATIONS[1])
    (tile, _) = broken.constants
    broken = broken._replace(constants={**broken.constants, tile: "no tile"})
    mine.expect(broken)
    mine.settle(job)
    assert not done(mine, broken)
    assert "CompilationError" in capfd.readouterr().err
    mine.settle(broken)
    assert mine.counts == {"here": 1, "workers": 1, "cache": 0}
    assert mine.expect(a_job(ACTIVATIONS[2]))


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false"])
def test_if_no_worker_can_start_this_process_compiles(mine, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    (first,), second = expect(mine, 1), a_job(ACTIVATIONS[1])
    assert not done(mine, first)
    mine.settle(first)
    assert not mine.expect(second)  # no worker has ever compiled a kernel
    mine.settle(second)
    assert mine.counts == {"here": 2, "workers": 0, "cache": 0}


def test_if_no_thread_can_start_this_process_compiles(mine, monkeypatch):
    def start(thread):
        # Python 3.12.
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    (job,) = expect(mine, 1)
    mine.settle(job)
    assert mine.counts == {"here": 1, "workers": 0, "cache": 0}


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("NORMPLUG_COMPILE_WORKERS", "0", 0),
        ("NORMPLUG_COMPILE_WORKERS", "3", 3),
        ("LOCAL_WORLD_SIZE", "4", 3),
        ("LOCAL_WORLD_SIZE", "1", 15),
        ("LOCAL_WORLD_SIZE", "32", 0),
    ],
)
def test_the_environment_sets_how_many_workers(mine, monkeypatch, name, value, most):
    monkeypatch.delenv("NORMPLUG_COMPILE_WORKERS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(18))
    monkeypatch.setenv(name, value)
    assert ahead.most_workers() == most
    if most == 0:
        assert not mine.expect(a_job())
        assert not mine._threads


def test_a_negative_number_of_workers_is_an_error(monkeypatch):
    monkeypatch.setenv("NORMPLUG_COMPILE_WORKERS", "-1")
    with pytest.raises(
        ValueError, match="must be a non-negative integer, not '-1'. Set it to 0"
    ):
        ahead.most_workers()


def running(mine):
    """The process of the only worker, once it runs."""
    server = mine._server.pid
    children = Path(f"/proc/{server}/task/{server}/children")
    wait_until(children.read_text)
    return int(children.read_text())


def test_a_killed_worker_only_loses_its_kernel(mine):
    first, second = expect(mine, 2)
    # Built once, as both have the same types of arguments.
    assert len(mine._launchers) == 1
    os.kill(running(mine), signal.SIGKILL)
    assert not done(mine, first)
    assert done(mine, second)


def test_without_the_server_this_process_compiles(mine):
    (first,), second = expect(mine, 1), a_job(ACTIVATIONS[1])
    assert done(mine, first)
    mine._server.kill()
    mine.expect(second)
    assert not done(mine, second)
    mine.settle(second)
    assert mine.counts["here"] == 1


def test_stop_ends_the_workers_at_once_and_starts_no_other(mine):
    jobs = expect(mine, 2)
    worker = running(mine)
    mine.stop()
    wait_until(lambda: not Path(f"/proc/{worker}").exists())
    assert mine._server.returncode == -signal.SIGKILL
    assert not any(done(mine, job) for job in jobs)
    assert not mine.expect(a_job(ACTIVATIONS[2]))


SCRIPT = """
print("once", flush=True)
import multiprocessing, sys
import test_ahead

def compile():
    sys.path.insert(0, sys.argv[1])
    mine = test_ahead.ahead.Ahead()
    test_ahead.triton.runtime.driver._active = test_ahead.Driver()
    mine.expect(test_ahead.a_job())
    print(test_ahead.done(mine, test_ahead.a_job()), flush=True)

process = multiprocessing.get_context("fork").Process(target=compile, daemon=True)
process.start()
process.join()
"""


def test_a_daemon_of_a_script_without_a_guard_has_workers_which_need_no_torch(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "torch.py").write_text(
        "raise ImportError('workers need no torch')"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    found = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "fake"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout == "once\nTrue\n", found.stderr
