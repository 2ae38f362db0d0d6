"""Run programs in processes of their own without importing torch again, which takes seconds."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Forks itself for each program that it receives. Unlike pytest, it has never initialised CUDA.
SERVER = """
import gc, importlib, json, os, sys, tempfile, traceback

importlib.import_module(sys.argv[1])

def run(code, arguments, hidden, environment, directory):
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = arguments or ["-c"]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return 1 if isinstance(stop.code, str) else stop.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

def answer(request):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = run(*request)
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()

gc.collect()
gc.freeze()  # or the collector of each fork copies the pages that it visits
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
"""


@cache
def server(imported):
    paths = [str(ROOT), *(str(Path(__file__).parents[1] / name) for name in ("support", "tools"))]
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER, imported],
        cwd=ROOT,
        env=os.environ | fixed,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)  # closing its stdin ends it
    return process


def forked(code, *arguments, imported="torch", hidden=(), environment=None, directory=ROOT):
    """Run a Python program that may import this repository; return the finished process.

    Args:
        code: the program.
        arguments: its `sys.argv`.
        imported: a module that is imported before the fork.
        hidden: packages that it cannot import.
        environment: extra environment variables.
        directory: the working directory.
    """
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    process = server(imported)
    words = [str(argument) for argument in arguments]
    request = (code, words, list(hidden), environment or {}, str(directory))
    print(json.dumps(request), file=process.stdin, flush=True)
    return subprocess.CompletedProcess([code, *words], *json.loads(process.stdout.readline()))
