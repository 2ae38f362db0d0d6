"""The bytes that autograd saves."""

import torch


def saved_bytes(call, besides=()):
    """The bytes that autograd saves in `call`, without those of the tensors `besides`."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    present = {tensor.untyped_storage().data_ptr() for tensor in besides}
    return sum(size for pointer, size in kept.items() if pointer not in present)
