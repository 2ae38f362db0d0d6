"""A faster interpreter of Triton, and what it can run."""

import dataclasses
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")
np = pytest.importorskip("numpy")

from triton.runtime import interpreter

from normplug._kernels.launch import INTERPRETED


def _patch_each_module_once():
    """Patch `tl` for good: Triton patches and restores it at each launch and each helper call."""
    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn):
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


def _cache_types():
    """Cache attributes by type: Triton derives them again for each value."""
    core = triton.language.core
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    find_dtype = interpreter._get_np_dtype
    types, tensors, dtypes = {}, {}, {}

    def block_type(self, element_ty, shape):
        key = (element_ty.name, *(getattr(n, "value", n) for n in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def tensor(self, handle, type):
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name], handle=handle)

    def np_dtype(type):
        if type.name not in dtypes:
            dtypes[type.name] = find_dtype(type)
        return dtypes[type.name]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    interpreter._get_np_dtype = np_dtype


def _reduce_by_halves():
    """Combine halves of tensors: Triton combines a single value with the next, in Python."""

    def reduce(reduction, tensors):
        axis, values = reduction.axis, [tensor.handle.data for tensor in tensors]
        while values[0].shape[axis] > 1:
            firsts, seconds = zip(
                *(np.split(value, 2, axis) for value in values), strict=True
            )
            halves = zip((*firsts, *seconds), (*tensors, *tensors), strict=True)
            halves = [reduction.to_tensor(value, like.dtype) for value, like in halves]
            values = [tensor.handle.data for tensor in reduction.combine_fn.fn(*halves)]
        if not reduction.keep_dims:
            values = [value.squeeze(axis) for value in values]
        return [
            reduction.to_tensor(value, like.dtype)
            for value, like in zip(values, tensors, strict=True)
        ]

    interpreter.ReduceOps.generic_reduce = reduce


def _skip_overflow_checks():
    """Triton computes each integer sum twice for an assertion that only debugging reads."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _refuse_constants_of_tensors():
    """Refuse a constexpr that holds a tensor, as a module's constexpr times a tensor is.

    Triton 3.8 cannot use it in most of its functions; the other versions let it pass.
    """
    core = triton.language.core
    make = core.constexpr.__init__

    def constexpr(self, value):
        if isinstance(value, core.tensor):
            raise TypeError(
                "a constexpr holds a tensor: put the constant right of the tensor"
            )
        make(self, value)

    core.constexpr.__init__ = constexpr


if INTERPRETED:
    _refuse_constants_of_tensors()
    _patch_each_module_once()
    _cache_types()
    _reduce_by_halves()
    _skip_overflow_checks()


def version(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


# Triton's interpreter supports numpy 2.4 since Triton 3.7.
INTERPRETS = version(triton) >= (3, 7) or version(np) < (2, 4)
# A GPU obeys every mask.
NEEDS_SINGLE_MASKS = pytest.mark.skipif(
    version(triton) < (3, 3),
    reason="this Triton's interpreter stores a single value even if its mask is False",
)
