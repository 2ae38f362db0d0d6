"""Layers that are exported, built on the meta device, or loaded from a stock checkpoint."""

import copy
import io
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import normplug


@pytest.mark.parametrize(
    ("kind", "strict", "momentum"),
    [
        (partial(normplug.LayerNorm, track_running_stats=True), False, None),
        (partial(normplug.LayerNorm, track_running_stats=True), True, 0.1),
        (normplug.BatchNorm1d, False, 0.1),
        (normplug.BatchNorm1d, True, None),
    ],
)
def test_a_layer_exported_in_training_mode_can_be_saved_and_keeps_training(
    kind, strict, momentum
):
    torch.compiler.reset()
    layer, x = kind(6, momentum=momentum), torch.randn(5, 6)
    for decomposed in (False, True):
        program = torch.export.export(copy.deepcopy(layer), (x,), strict=strict)
        if decomposed:
            program = program.run_decompositions()
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 warns of its own archive
            torch.export.save(program, file)
            file.seek(0)
            loaded = torch.export.load(file).module()
        eager = copy.deepcopy(layer)
        for _ in range(2):
            torch.testing.assert_close(loaded(x), eager(x))
        # They include watched statistics, which are not saved in a state_dict.
        torch.testing.assert_close(
            dict(loaded.named_buffers()), dict(eager.named_buffers())
        )
        # The number of batches.
        assert 2 in [buffer.tolist() for buffer in eager.buffers()]


FRESH = {"watched_mean": 0.0, "watched_var": 1.0, "watched_count": 0}


def statistics(layer):
    return {name: buffer.item() for name, buffer in layer.named_buffers()}


NORMS = (1, 3, 5)  # the LayerNorms of blocks()


def blocks():
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.BatchNorm1d(6), nn.LayerNorm(6, bias=False),
        nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False),
    )  # fmt: skip


def swapped_blocks(place, swapped):
    """A model that is built inside the context `place`, and swapped inside or outside it."""
    with place:
        model = blocks()
        if swapped == "inside":
            return normplug.swap(model, track_running_stats=True)
    return normplug.swap(model, track_running_stats=True)


def assert_started(model, stock):
    """Assert that the model is the stock model, and that both train alike."""
    assert list(model.state_dict()) == list(stock.state_dict())
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)
    x = torch.randn(8, 4)
    torch.testing.assert_close(model.train()(x), stock.train()(x))
    assert all(model[index].watched_count == 1 for index in NORMS)
    assert all(not t.is_meta for t in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("built", ["inside", "outside"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "how", ["assign", "to_empty", "reset_parameters", "moved to meta"]
)
def test_a_stock_checkpoint_gives_a_meta_model_fresh_statistics(how, strict, built):
    stock, model = blocks(), swapped_blocks(torch.device("meta"), built)
    stock(torch.randn(9, 4))
    if how == "moved to meta":
        model = normplug.swap(blocks(), track_running_stats=True)
        model(torch.randn(9, 4))
        model.to("meta")
    if how != "assign":
        model.to_empty(device="cpu")
        assert [statistics(model[index]) for index in NORMS] == [
            {}
        ] * 3  # until the first batch
    if how == "reset_parameters":
        for index in NORMS:
            model[index](torch.randn(8, 6))
            model[index].reset_parameters()
            assert statistics(model[index]) == FRESH
    model.load_state_dict(stock.state_dict(), strict=strict, assign=how == "assign")
    assert_started(model, stock)


@pytest.mark.parametrize("assign", [True, False])
def test_loading_a_checkpoint_leaves_the_watched_statistics(assign):
    trained, stock = normplug.swap(blocks(), track_running_stats=True), blocks()
    trained(torch.randn(9, 4))
    before = [statistics(trained[index]) for index in NORMS]
    trained.load_state_dict(stock.state_dict(), assign=assign)
    assert [statistics(trained[index]) for index in NORMS] == before != [FRESH] * 3


def test_statistics_keep_their_values_under_a_change_of_dtype():
    model = normplug.swap(blocks(), track_running_stats=True)
    model(torch.randn(9, 4))
    before = [statistics(model[index]) for index in (1, 3, 5)]
    assert [statistics(model.double()[index]) for index in (1, 3, 5)] == before


def test_a_compiled_layer_without_weights_takes_its_inputs_device():
    torch.compiler.reset()
    settings = {"elementwise_affine": False, "track_running_stats": True}
    layer = normplug.LayerNorm(6, **settings, device="meta")
    x = torch.randn(5, 6)
    torch.compile(layer, backend="aot_eager")(x)
    eager = normplug.LayerNorm(6, **settings)
    eager(x)
    assert statistics(layer) == pytest.approx(statistics(eager))
    unasked = normplug.LayerNorm(6)  # by default, only eager steps on a GPU update them
    torch.compile(unasked, backend="aot_eager")(x)
    assert statistics(unasked) == FRESH


@pytest.mark.parametrize(
    ("file", "include_buffers"), [("model.bin", False), ("model.safetensors", True)]
)
@pytest.mark.parametrize("built", ["inside", "outside"])
@pytest.mark.parametrize("last", ["cpu", "disk"])
def test_accelerate_loads_a_stock_checkpoint(
    tmp_path, last, built, include_buffers, file
):
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    stock = blocks()
    stock(torch.randn(9, 4))
    save = torch.save if file == "model.bin" else safetensors.save_file
    save(stock.state_dict(), tmp_path / file)
    model = swapped_blocks(
        accelerate.init_empty_weights(include_buffers=include_buffers), built
    )
    places = {"": "cpu"}
    if last == "disk":
        places = {**{str(index): "cpu" for index in (0, 1, 2, 3, 5)}, "4": "disk"}
    with warnings.catch_warnings():
        # Accelerate's, of the file's metadata and its progress.
        warnings.simplefilter("ignore")
        model = accelerate.load_checkpoint_and_dispatch(
            model,
            str(tmp_path / file),
            device_map=places,
            offload_folder=str(tmp_path / "off"),
        )
    x = torch.randn(8, 4)
    torch.testing.assert_close(model.eval()(x), stock.eval()(x))
    if last == "cpu":
        assert_started(model, stock)
    model.train()(x)
    assert statistics(model[1])["watched_count"] == (2 if last == "cpu" else 1)
