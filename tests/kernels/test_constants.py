"""A launch describes its kernel by two objects: a tile and flags."""

import ast
import inspect
import pickle
import textwrap
from dataclasses import fields, replace

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

import ptx
from launches import batch_norm_launches
from normplug._kernels import launch
from normplug._kernels.batch_norm import columns, schedule
from normplug._kernels.constants import Constants, as_compiled
from normplug._kernels.launch import Launch

pytestmark = [
    pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(
        not launch.BUILDS, reason="on this Triton the kernels are not used"
    ),
]


def flags_read(function, seen):
    """The flags that a kernel and its helpers read; `seen` are the functions visited before."""
    if function in seen:
        return set()
    seen.add(function)
    names = function.fn.__globals__
    read = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function.fn)))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "F":
                read.add(node.attr)
            found = getattr(names.get(node.value.id), node.attr, None)
        elif isinstance(node, ast.Name):
            found = names.get(node.id)
        else:
            continue
        if isinstance(found, triton.JITFunction):
            read |= flags_read(found, seen)
    return read


def test_a_launch_sets_only_the_flags_that_its_kernel_reads():
    """Else two calls would compile one kernel twice."""
    defaults = Constants(acc=None)
    unread = set()
    kernels = {}
    for label, made, job, _ in ptx.every_launch():
        kernel = job.kernel
        if kernel not in kernels:
            kernels[kernel] = flags_read(kernel, set())
        constants = made._constants["F"]
        for field in fields(constants):
            is_set = getattr(constants, field.name) != getattr(defaults, field.name)
            if is_set and field.name not in kernels[kernel]:
                unread.add((label, field.name))
    assert len(kernels) == 15
    assert not unread


def test_flags_of_equal_values_are_one_kernel_in_any_process():
    first, second = (
        next(batch_norm_launches((64, 8, 1, True), torch.float32, False, **options))
        for options in ({"activation": "relu"}, {"activation": "silu"})
    )
    dtypes = [torch.float32] * len(first.pointers)
    job = first.job(dtypes)
    again = next(
        batch_norm_launches((64, 8, 1, True), torch.float32, False, activation="relu")
    )
    assert again.job(dtypes).key == job.key
    assert second.job(dtypes).key != job.key
    assert repr(pickle.loads(pickle.dumps(job[1:]))) == repr(job[1:])


def test_a_kernel_reads_each_field_as_a_constant():
    constants = as_compiled(Constants(acc=tl.float32, world=2))
    assert all(isinstance(value, tl.constexpr) for value in vars(constants).values())
    assert constants.world.value == 2
    assert repr(constants) != repr(as_compiled(Constants(acc=tl.float32, world=3)))


NUMBERS = {"momentum": 0.1, "eps": 0.0, "root": 1.0, "PEERS": 0}
WORK = schedule.geometry(64, 8, 1, True, 4, 1, 132, True).forward(True, True)


@pytest.mark.parametrize("numbers", [{"momentum": 0.1}, NUMBERS | {"WORLD": 2}])
def test_a_launch_takes_exactly_the_numbers_of_its_kernel(numbers):
    kernel = columns.batch_norm_columns_forward
    with pytest.raises(TypeError, match="batch_norm_columns_forward takes the numbers "):
        Launch(kernel, WORK, Constants(acc=tl.float32), **numbers)


def test_a_tile_is_frozen():
    with pytest.raises(AttributeError):
        WORK.tile.bc = 2
    assert replace(WORK.tile, bc=2).bc == 2
