"""Each kernel once in Triton's own interpreter, without the changes of `support/interpreted.py`."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_batch_norm_kernels
import test_group_norm_kernels
import test_layer_norm_kernels
import torch

import group_kernel_cases
import kernel_cases
import normplug
import pool_cases
import routes
import row_cases
from normplug._kernels.launch import Launch
from programs import program, shared_folder


class Setup(NamedTuple):
    """A case, the module that runs it, and changes to the schedules chosen for it."""

    module: Any
    case: Any
    schedules: dict[str, Any]


def setup_of(module, tests, name):
    return Setup(module, *tests.SETUPS[name])


def setup_of_group_norm(name):
    return setup_of(group_kernel_cases, test_group_norm_kernels, name)


def setup_of_rows(name):
    return setup_of(row_cases, test_layer_norm_kernels, name)


def setup_of_batch_norm(name):
    return setup_of(kernel_cases, test_batch_norm_kernels, name)


# Each launches a kernel forward and one backward.
SETUPS = {
    "batch_norm_planes": setup_of_batch_norm("planes in tiles"),
    "batch_norm_columns": setup_of_batch_norm("rows, phased"),
    "batch_norm_pool": Setup(pool_cases, pool_cases.PoolCase((2, 3, 5, 4)), {}),
    "group_norm_planes": setup_of_group_norm("tiles of planes"),
    "group_norm_planes_solo": setup_of_group_norm("groups read twice"),
    "group_norm_columns": setup_of_group_norm("items of columns"),
    "layer_norm_rows": setup_of_rows("rows, folded"),
    "layer_norm_wide": setup_of_rows("wide"),
}
PLAIN = """
import sys, torch, test_plain_interpreter as plain
assert "interpreted" not in sys.modules
torch.save({name: plain.results(name) for name in plain.SETUPS}, sys.argv[0])
"""


def results(name):
    """The kernels that a setup launches, and what they compute."""
    module, case, schedules = SETUPS[name]
    kernels = []
    launch = Launch.__call__

    def watched(self, *arguments):
        kernels.append(self._kernel.__name__)
        launch(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        routes.reschedule(patched, **schedules)
        patched.setattr(Launch, "__call__", watched)
        return kernels, module.run(case, module.make(case), "triton")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """`results` of every setup in a process that does not change the interpreter."""
    with shared_folder(tmp_path_factory, "plain") as folder:
        file = folder / "results.pt"
        if not file.exists():
            done = program(PLAIN, file)
            assert done.returncode == 0, done.stderr
        return torch.load(file)


@pytest.mark.parametrize("name", SETUPS)
def test_the_changed_interpreter_computes_what_tritons_own_does(name, plain):
    kernels, expected = plain[name]
    assert f"{name}_forward" in kernels
    assert f"{name.removesuffix('_solo')}_backward" in kernels
    changed_kernels, changed = results(name)
    assert changed_kernels == kernels
    torch.testing.assert_close(changed, expected, rtol=1e-5, atol=1e-5)


def test_every_kernel_has_a_setup(plain):
    folder = Path(normplug.__file__).parent / "_kernels"
    texts = [path.read_text() for path in folder.glob("*/*.py")]
    kernels = set(re.findall(r"^@kernel\ndef (\w+)", "\n".join(texts), re.MULTILINE))
    kernels.discard("batch_norm_merge")  # of several processes: see test_sync_kernels
    assert kernels == {kernel for launched, _ in plain.values() for kernel in launched}
