"""The bytes that autograd saves, and modules that train alike."""

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


def check_training(ours, theirs, data):
    """Assert that some steps of both give the same parameters, buffers and outputs."""
    for layer in (ours, theirs):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for x in data:
            optimizer.zero_grad()
            (layer(x) - 1).square().mean().backward()
            optimizer.step()
        layer.eval()
    counted = "watched_count" if hasattr(ours, "watched_count") else "num_batches_tracked"
    assert getattr(ours, counted) == len(data)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    torch.testing.assert_close(ours(data[0]), theirs(data[0]))
    assert getattr(ours, counted) == len(data)
