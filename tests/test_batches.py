"""How batches are read: by `check`, `doctor`, `recalibrate` and `bench.measure` alike."""

import collections
import os
import random
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import normplug
import normplug.bench
from normplug._batches import Reader

X, Y = torch.randn(8, 4), torch.randn(8, 6)
LABELS = torch.arange(8) % 3


class One(nn.Module):
    """Keeps what it was called with."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x, mask=None):
        self.seen = (x, mask)
        y = self.norm(self.linear(x))
        return y if mask is None else y * mask


class Two(One):
    def forward(self, x, y):
        self.seen = (x, y)
        return self.norm(self.linear(x) + y)


class Pair(One):
    """Takes one argument, which is a pair."""

    def forward(self, pair):
        x, y = pair
        self.seen = (x, y)
        return self.norm(self.linear(x) + y)


class Targets(One):
    """Needs its targets in training, as torchvision's detectors do."""

    def forward(self, x, targets=None):
        if targets is None:
            raise ValueError("targets should not be none when in training mode")
        self.seen = (x, targets)
        return self.norm(self.linear(x))


Named = collections.namedtuple("Named", ["x", "label"])
# A model, a batch, and what the model must be called with.
READINGS = {
    "a tensor": (One, X, (X, None)),
    "an array": (One, X.numpy(), (X, None)),
    "an array of float64": (One, X.double().numpy(), (X, None)),
    "the list of a loader": (One, [X, LABELS], (X, None)),
    "a tuple with labels": (One, (X, LABELS), (X, None)),
    "a tuple of one": (One, (X,), (X, None)),
    "a named tuple": (One, Named(X, LABELS), (X, None)),
    "arrays with labels": (One, [X.numpy(), LABELS.numpy()], (X, None)),
    "labels that are a number": (One, (X, 3), (X, None)),
    "labels that are a number of numpy": (One, (X, np.float32(3)), (X, None)),
    "a mapping with more keys": (One, {"x": X, "label": LABELS}, (X, None)),
    "a mapping with an optional input": (One, {"x": X, "mask": Y}, (X, Y)),
    "a mapping with labels beside it": (One, ({"x": X}, LABELS), (X, None)),
    "a mapping that cannot change": (One, types.MappingProxyType({"x": X}), (X, None)),
    "two inputs": (Two, (X, Y), (X, Y)),
    "two inputs in a list": (Two, [X, Y], (X, Y)),
    "two inputs and labels": (Two, (X, Y, LABELS), (X, Y)),
    "two inputs in a tuple beside labels": (Two, ((X, Y), LABELS), (X, Y)),
    "two inputs in a mapping": (Two, {"y": Y, "x": X, "label": LABELS}, (X, Y)),
    "a pair as one argument": (Pair, (X, Y), (X, Y)),
    "a pair beside labels": (Pair, ((X, Y), LABELS), (X, Y)),
    "an optional input that it needs": (Targets, (X, LABELS), (X, LABELS)),
}


def as_expected(seen, expected):
    pairs = zip(seen, expected, strict=True)
    return all(a is None if b is None else torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", READINGS)
def test_a_model_gets_the_inputs_of_a_batch(name):
    make, batch, expected = READINGS[name]
    model = make()
    reader = Reader("doctor", model)
    assert len(list(reader.batches(batch))) == 1
    reader.run(batch)
    assert as_expected(model.seen, expected)
    reader.run(batch)  # the reading is known
    assert as_expected(model.seen, expected)
    normplug.doctor(model, batch)
    assert [row.calls for row in normplug.recalibrate(model, batch)] == [1]
    assert [row.calls for row in normplug.recalibrate(model, [batch, batch])] == [2]
    assert len(normplug.check(normplug.swap(model), batch)) == 1


def test_readings_are_tried_once_for_a_loader():
    model, calls = One(), []
    model.register_forward_pre_hook(lambda _, inputs: calls.append(type(inputs[0])))
    reader = Reader("doctor", model)
    for _ in range(3):
        reader.run([X, LABELS])
    assert calls == [list, torch.Tensor, *3 * [torch.Tensor]]


def test_a_loss_of_doctor_gets_the_batch_as_tensors():
    seen = []

    def loss(y, batch):
        seen.append(batch)
        return nn.functional.cross_entropy(y, batch[1])

    normplug.doctor(One(), [X.numpy(), LABELS.numpy()], loss=loss)
    assert torch.equal(seen[0][0], X)
    assert torch.equal(seen[0][1], LABELS)


SERIES = {
    "a loader": lambda: DataLoader(TensorDataset(X, LABELS), 4),
    "a generator": lambda: (x for x in X.split(4)),
    "a list of tensors": lambda: list(X.split(4)),
    "a tuple of tensors": lambda: X.split(4),
    "a list of pairs": lambda: [(X, LABELS), (X, LABELS)],
    "a list of mappings": lambda: [{"x": X, "label": 1}, {"x": X, "label": 1}],
}


@pytest.mark.parametrize("name", SERIES)
def test_batches_in_a_list_or_a_loader_are_told_from_one_batch(name):
    model = One()
    assert [row.calls for row in normplug.recalibrate(model, SERIES[name]())] == [2]
    normplug.doctor(model, SERIES[name]())
    normplug.check(normplug.swap(model), SERIES[name]())  # the first batch


def test_batches_of_different_lengths_are_batches_and_targets_of_another_width_are_not():
    words = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(0, 1), nn.BatchNorm1d(4))
    series = [torch.randint(9, (3, length)) for length in (5, 6, 7)]
    assert [row.calls for row in normplug.recalibrate(words, series)] == [3]
    assert [row.calls for row in normplug.recalibrate(One(), [X, Y])] == [1]


def test_transformers_batches_are_read_and_left_as_they_are():
    tf = pytest.importorskip("transformers")
    data = {"input_ids": torch.randint(9, (4, 5)), "labels": torch.zeros(4), "extra": 1}
    encoding = tf.BatchEncoding(data)

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(9, 4), nn.LayerNorm(4)

        def forward(self, input_ids, labels=None):
            assert labels is not None
            return self.norm(self.embedding(input_ids))

    model = normplug.swap(Words())
    seen = []
    normplug.doctor(model, encoding, loss=lambda y, batch: seen.append(batch) or y.sum())
    assert type(seen[0]) is tf.BatchEncoding
    assert seen[0].input_ids is not encoding.input_ids
    assert seen[0]["extra"] == 1
    normplug.check(model, encoding)


def test_every_tensor_of_a_batch_is_moved_to_the_models_device():
    class Graph:
        def to(self, device):
            self.device = device
            return self

    graph = Graph()
    batch = {"a": [X, (LABELS, "text")], "b": np.arange(3), "graph": graph}
    moved = Reader("doctor", One().to("meta")).prepared(batch)
    (x, (labels, text)), array = moved["a"], moved["b"]
    assert x.device.type == labels.device.type == array.device.type == "meta"
    assert text == "text"
    assert moved["graph"].device.type == "meta"
    assert moved["graph"] is not graph
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert type(Reader("doctor", One()).prepared(packed)) is type(packed)


@pytest.mark.parametrize("name", ["compiled", "DDP", "DataParallel"])
def test_a_wrapped_model_gets_the_keywords_that_its_forward_names(name):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29671")
    wrap = {
        "compiled": lambda model: torch.compile(model, backend="eager"),
        "DDP": nn.parallel.DistributedDataParallel,
        "DataParallel": nn.DataParallel,
    }[name]
    if name == "DDP":
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        model = wrap(normplug.swap(Two()))
        batch = {"x": X, "y": Y, "label": LABELS}
        normplug.recalibrate(model, [batch])
        normplug.check(model, batch)
        model.get_submodule(
            next(p for p, m in model.named_modules() if p.endswith("norm"))
        ).eval()
        (finding,) = normplug.doctor(model, batch).findings
        assert type(model.get_submodule(finding.layer)) is normplug.BatchNorm1d
    finally:
        if name == "DDP":
            torch.distributed.destroy_process_group()


def test_a_batch_is_not_changed_by_a_model_that_works_in_place():
    class Normalise(One):
        def forward(self, x):
            return self.norm(self.linear(x.sub_(1)))

    x = X.clone()
    normplug.doctor(Normalise(), (x, LABELS))
    normplug.recalibrate(Normalise(), x)
    assert torch.equal(x, X)


def test_the_generators_are_left_as_they_were_by_a_loader_that_shuffles():
    torch.manual_seed(0)
    model = normplug.swap(One())
    loader = DataLoader(TensorDataset(X, LABELS), 4, shuffle=True)
    before = torch.get_rng_state(), random.getstate()
    for use in (normplug.doctor, normplug.recalibrate, normplug.check):
        use(model, loader)
        assert torch.equal(torch.get_rng_state(), before[0]), use
        assert random.getstate() == before[1]


CALLERS = {
    "doctor": normplug.doctor,
    "recalibrate": normplug.recalibrate,
    "check": normplug.check,
    "bench.measure": lambda model, batch: normplug.bench.measure(model, batch, rounds=1),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_a_batch_that_the_model_refuses_is_shown_with_what_was_tried_and_a_way_out(
    caller,
):
    model = One()
    if caller == "check":
        normplug.swap(model)
    for batch, shown in (
        (
            {"image": X, "label": LABELS},
            "model(dict {image: Tensor (8, 4), label: Tensor (8,)})",
        ),
        ([X[:, 1:], LABELS], "model(Tensor (8, 3)) raised RuntimeError: mat1 and mat2"),
        ("text", "model(str)"),
    ):
        if batch == "text" and caller in ("doctor", "recalibrate"):
            with pytest.raises(
                TypeError, match=f"normplug.{caller}: loader must be an iterable"
            ):
                CALLERS[caller](model, batch)
            continue
        with pytest.raises(RuntimeError) as caught:
            CALLERS[caller](model, batch)
        text = str(caught.value)
        assert text.startswith(
            f"normplug.{caller}: One.forward(x, mask=None) does not take"
        )
        assert shown in text
        assert text.endswith("Pass a tensor, a tuple of the inputs, (inputs, labels), a mapping of "
                             "forward's keywords, or a loader of these.")  # fmt: skip
        assert isinstance(caught.value.__cause__, (RuntimeError, TypeError))
    with pytest.raises(
        RuntimeError, match="Two.forward.x, y. does not take the batch Tensor"
    ):
        CALLERS[caller](normplug.swap(Two()), X)


def test_too_little_memory_is_not_a_batch_that_is_refused():
    class Large(One):
        def forward(self, x):
            raise torch.OutOfMemoryError("CUDA out of memory")

    for batch in (X, (X, LABELS)):
        with pytest.raises(torch.OutOfMemoryError):
            normplug.recalibrate(Large(), batch)


def test_an_empty_loader_is_an_error():
    for use in (normplug.doctor, normplug.recalibrate, normplug.check):
        with pytest.raises(ValueError, match="the loader yielded no batch"):
            use(normplug.swap(One()), iter([]))
