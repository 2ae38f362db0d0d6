"""`watch`: what is logged is measured, in any loop."""

import copy
import gc
import io
import math
import pickle
import threading
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import (
    is_parametrized,
    register_parametrization,
    type_before_parametrizations,
)
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import normplug
from normplug import freeze, fuse, swap, watch
from normplug.modules.probe import Measured
from statistics_cases import Checkpointed, images, net, rows_of

GOLDEN = normplug.target_variance("golden")
COMPILE = partial(torch.compile, backend="eager")


STOCK_OR_SWAPPED = pytest.mark.parametrize(
    "change", [lambda m: m, swap], ids=["stock", "swapped"]
)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))


def classes(model):
    """The class of each module; of a parametrized one, its class without."""
    return [type_before_parametrizations(module) for module in model.modules()]


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    return [hook for m in model.modules() for kind in kinds for hook in getattr(m, kind)]


def assert_nothing_is_left(model, before):
    assert classes(model) == before
    assert not any("_probe" in vars(module) for module in model.modules())
    assert hooks(model) == []


def steps(w):
    """The steps of a watch's rows."""
    return [row.step for row in w.rows]


@pytest.mark.parametrize("change", [lambda m: m, swap, lambda m: fuse(swap(m)), COMPILE])
def test_any_loop_is_measured_on_the_steps_that_are_asked_for(change, tmp_path):
    torch.compiler.reset()
    model = net()
    model[1].weight.data.fill_(2.0)
    ready = change(model)
    before = classes(model)
    with watch(ready, every=2) as w:
        for step in range(4):
            ready(images(4, step)).sum().backward()
            ready.eval()(images(2))
            ready.train()
    assert_nothing_is_left(model, before)
    found = [(row.step, row.layer.split(".")[-1]) for row in w.rows]
    assert found == [(0, "1"), (0, "4"), (2, "1"), (2, "4")]
    for row in w.rows:
        scale = 4.0 if row.layer.endswith("1") else 1.0
        assert row.output_variance == pytest.approx(1.0, rel=1e-3)
        assert row.affine_variance == pytest.approx(scale, rel=1e-3)
    variance = net()[0](images(4, 2)).var((0, 2, 3), correction=0).mean().item()
    assert w.rows[2].input_variance == pytest.approx(variance, rel=1e-4)
    w.to_csv(tmp_path / "v.csv")
    assert len(rows_of(tmp_path / "v.csv")) == 4
    assert w.table().startswith("variance at step 2\nlayer")


@pytest.mark.parametrize("change", [lambda m: m, lambda m: fuse(swap(m))])
@pytest.mark.parametrize("after", ["backward", "nothing"])
def test_details_are_measured_on_the_tensors(change, after, tmp_path):
    model, x = change(net()), images(8)
    model[1].bias.data = torch.tensor([-9.0, 9.0, 0.0, 0.0])
    with watch(model, every=1, details=True) as w:
        y = model(x)
        if after == "backward":
            (3 * y).sum().backward()
    first, second = w.rows
    h = net()[0](x)
    variances = h.var((0, 2, 3), correction=0).sort().values
    assert first.input_mean == pytest.approx(h.mean().item(), rel=1e-4)
    found = first.input_variance_10, first.input_variance_50, first.input_variance_90
    assert found == pytest.approx(variances[[0, 2, 3]].tolist(), rel=1e-4)
    assert (first.dead, first.saturated) == (0.25, 0.25)
    assert (second.dead, second.saturated) == (0.0, 0.0)
    gradient = 9.0 if after == "backward" else math.nan
    assert second.gradient == pytest.approx(gradient, nan_ok=True)
    w.to_csv(tmp_path / "v.csv")
    header = (tmp_path / "v.csv").read_text().splitlines()[0]
    assert header.endswith("dead,saturated,gradient")


def test_details_of_rows_are_taken_over_features():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].bias.data = torch.tensor([-9.0, 9.0, 0.0, 0.0])
    with watch(model, every=1, details=True) as w:
        model(torch.randn(2, 5, 4)).sum().backward()
    assert (w.rows[0].dead, w.rows[0].saturated, w.rows[0].gradient) == (0.25, 0.25, 1.0)


def of_channels(x):
    return x.var((0, 2, 3), correction=0)


def of_samples(x):
    return x.var((2, 3), correction=0)


def of_groups(x):
    return x.reshape(8, -1).var(1, correction=0)


# What makes a layer, and the variances that it averages.
VARIANCES = {
    "BatchNorm": (lambda: nn.BatchNorm2d(6), of_channels),
    "frozen BatchNorm": (lambda: freeze(nn.BatchNorm2d(6), affine=False), of_channels),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), of_groups),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(6, affine=True), of_samples),
    "frozen InstanceNorm": (
        lambda: freeze(nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
        of_samples,
    ),
    "LayerNorm": (
        lambda: nn.LayerNorm((6, 5, 5)),
        lambda x: x.var((1, 2, 3), correction=0),
    ),
    "RMSNorm": (lambda: nn.RMSNorm((6, 5, 5)), lambda x: x.square().mean((1, 2, 3))),
}


@pytest.mark.parametrize("name", VARIANCES)
def test_the_variances_are_those_of_the_tensors_without_and_with_the_weight(name):
    make, variances = VARIANCES[name]
    layer = swap(make(), 0.5)
    model = nn.Sequential(layer)
    if name != "RMSNorm":
        layer.eps = 1e-3  # which matters
    x = torch.randn(4, 6, 5, 5) * 0.1 + 3
    plain = layer(x)  # the weight is 1 and the bias 0
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1, 0.5)
    with watch(model, every=1) as w:
        y = model(x)
    measured = (
        w.rows[0].input_variance,
        w.rows[0].output_variance,
        w.rows[0].affine_variance,
    )
    expected = [variances(t).mean().item() for t in (x, plain, y)]
    assert measured == pytest.approx(expected, rel=1e-4, abs=1e-6)
    rms = layer.weight.square().mean().sqrt().item()
    assert w.rows[0].weight_rms == pytest.approx(rms)


def test_eps_is_added_to_a_half_precision_running_variance_without_rounding():
    layer = freeze(normplug.BatchNorm2d(6, eps=3e-3, mode=0.5).bfloat16())
    model = nn.Sequential(layer)
    with watch(model, every=1) as w:
        y = model(torch.randn(16, 6, 20, 20, dtype=torch.bfloat16))
    expected = of_channels(y.float()).mean().item()
    assert w.rows[0].output_variance == pytest.approx(expected, rel=1e-3)


def test_weights_of_zero_tell_nothing_of_the_output_before_them():
    model = swap(net())
    model[1].weight.data.zero_()
    model[4].weight.data[:3] = 0.0
    with watch(model) as w:
        model(images(8))
    first, second = w.rows
    assert math.isnan(first.output_variance)
    assert first.affine_variance == 0
    assert second.affine_variance == pytest.approx(0.0, abs=1e-6)


def test_checkpointing_an_error_and_a_second_watch_leave_no_trace(tmp_path):
    pytest.importorskip("matplotlib")
    x = images(4).requires_grad_()
    for model in (net(), fuse(swap(net()))):
        outer = Checkpointed(model)
        for watched in (model, outer):
            with watch(watched, every=1) as w:
                for _ in range(2):
                    outer(x).sum().backward()
            assert steps(w) == [0, 0, 1, 1]
    model = net()
    before = classes(model)
    with pytest.raises(RuntimeError), watch(model, every=1) as w:
        model(images(4)[:, :2])
    assert_nothing_is_left(model, before)
    with watch(model, every=1) as w:
        for _ in range(3):
            model(images(4))
    w.plot(tmp_path / "variance.png")
    assert (tmp_path / "variance.png").stat().st_size > 5_000


@STOCK_OR_SWAPPED
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_watches_overlap_and_end_in_any_order(change, order):
    model = change(nn.Sequential(small(), nn.LayerNorm(8)))
    before = classes(model)
    of_all = watch(model, every=1), watch(model, every=2, details=True)
    watches = [*of_all, watch(model[0], every=1)]
    for w in watches:
        w.__enter__()
    for number in order:
        for _ in range(2):
            model(torch.randn(16, 4)).sum().backward()
        watches[number].__exit__(None, None, None)
    assert_nothing_is_left(model, before)
    pairs = [order.index(number) + 1 for number in range(3)]  # of steps
    assert [len(w.rows) for w in watches] == [6 * pairs[0], 3 * pairs[1], 4 * pairs[2]]
    for w in watches:
        assert all(row.output_variance == pytest.approx(1, rel=1e-2) for row in w.rows)


class Gan(nn.Module):
    """Its loop calls its parts alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        self.d = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def train_for(self, steps):
        optimizers = [torch.optim.SGD(p.parameters(), 0.1) for p in (self.d, self.g)]
        for _ in range(steps):
            for optimizer in optimizers:
                self.d(self.g(torch.randn(8, 4))).mean().backward()
                self.eval()
                self.g(100 * torch.randn(8, 4))  # evaluation is not measured
                self.train()
                with torch.no_grad():
                    self.g(100 * torch.randn(8, 4))
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("change", [lambda m: m, swap])
def test_where_the_loop_calls_parts_a_step_is_one_of_the_first_optimizer(change):
    model = change(Gan())
    before = classes(model)
    with watch(model, every=2) as w:
        model.train_for(5)
    assert_nothing_is_left(model, before)
    expected = [(step, layer) for step in (0, 2, 4) for layer in ("g.1", "d.1")]
    assert [(row.step, row.layer) for row in w.rows] == expected
    assert all(row.output_variance == pytest.approx(1.0, rel=1e-2) for row in w.rows)
    assert all(row.input_variance < 10 for row in w.rows)
    assert w.table().startswith("variance at step 4\nlayer")


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_parts_are_measured_by_a_second_graph():
    torch.compiler.reset()
    model, graphs = Gan(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    g = torch.compile(model.g, backend=backend, dynamic=False)
    d = torch.compile(model.d, backend=backend, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, every=2) as w:
        for _ in range(6):
            d(g(torch.randn(8, 4))).mean().backward()
            optimizer.step()
    assert steps(w) == [0, 0, 2, 2, 4, 4]
    assert all(row.output_variance == pytest.approx(1.0, rel=1e-2) for row in w.rows)
    assert len(graphs) == 4


def test_another_optimizer_takes_over_where_the_first_one_is_no_longer_used():
    model = Gan()
    first = torch.optim.SGD(model.g.parameters(), 0.1)
    second = torch.optim.SGD(model.d.parameters(), 0.1)
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with watch(model, every=1) as w:
        for optimizer in (first, second, second, second):
            model.d(model.g(torch.randn(8, 4))).mean().backward()
            optimizer.step()
            stranger.step()
    assert steps(w) == [0, 0, 1, 1, 2, 2]


def test_parts_without_an_optimizer_are_a_single_step_and_a_forward_takes_over():
    model = small()
    with watch(model, every=1) as w:
        for _ in range(3):
            model[1](model[0](torch.randn(8, 4)))
    assert [(row.step, row.layer) for row in w.rows] == [(0, "1"), (0, "2")]
    assert math.isnan(w.rows[1].input_variance)
    with w:
        model[1](model[0](torch.randn(8, 4)))
        for _ in range(2):
            model(torch.randn(8, 4))
    assert steps(w) == [0, 0, 1, 1, 2, 2]
    assert not math.isnan(w.rows[-1].input_variance)


@STOCK_OR_SWAPPED
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_runs_only_inside_checkpoints_is_measured(reentrant, change):
    model = change(small())
    # Repeat the whole forward, also after the gradient of the last norm was measured.
    with watch(model, every=1, details=True) as w, set_checkpoint_early_stop(False):
        for _ in range(2):
            x = torch.randn(8, 4, requires_grad=True)
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
    assert steps(w) == [0, 0, 1, 1]
    assert [row.gradient for row in w.rows if row.layer == "2"] == [1.0, 1.0]
    assert not any(math.isnan(row.gradient) for row in w.rows)


def pickled(model, protocol=None):
    return pickle.loads(pickle.dumps(model, protocol))


def run_whole(model):
    return model(torch.randn(8, 4))


def run_parts(model):
    return model[2](model[1](model[0](torch.randn(8, 4))))


@STOCK_OR_SWAPPED
@pytest.mark.parametrize("run", [run_whole, run_parts])
def test_a_copy_is_not_measured_and_keeps_nothing(change, run):
    model = change(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = classes(model)
    copies, loaded = [], []

    def make_copies():
        copies.append(copy.deepcopy(model))
        loaded.append(pickled(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded.append(torch.load(buffer, weights_only=False))
        assert type(copy.copy(model[1])) is before[2]

    with watch(model, every=1) as w:
        y = run(model)
        make_copies()
        y.sum().backward()
        make_copies()
        optimizer.step()
        make_copies()
        rows = len(w.rows)
        copies[0](torch.randn(8, 4)).sum().backward()
        assert len(w.rows) == rows
    for made in copies:
        assert_nothing_is_left(made, before)
    for made in loaded:
        made(torch.randn(8, 4))
        assert_nothing_is_left(made, before)


def parametrized(model):
    register_parametrization(model[2], "weight", nn.Identity())
    return model


CHANGES = {
    "parametrized": parametrized,
    "parametrized and swapped": lambda m: swap(parametrized(m)),
    "frozen": freeze,
    "loaded after it was frozen": lambda m: pickled(freeze(m)),
    "frozen and parametrized": lambda m: parametrized(freeze(m)),
    "parametrized and frozen": lambda m: freeze(parametrized(m)),
    "frozen and swapped": lambda m: swap(freeze(m)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_copy_while_a_norm_measures_is_as_without_the_watch(change):
    model = change(small())
    copies = [copy.deepcopy]
    if not is_parametrized(model[2]):
        copies.append(lambda m: nn.Sequential(*map(copy.copy, m)))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            copies.append(partial(pickled, protocol=protocol))
    with watch(model, every=1):
        run_parts(model)
        made = [make(model) for make in copies]
    x = torch.randn(8, 4)
    for make, twin in zip(copies, made, strict=True):
        expected = make(model)
        assert torch.equal(twin(x), expected(x))
        assert_nothing_is_left(twin, classes(expected))
        assert set(vars(twin[2])) == set(vars(expected[2]))
        assert twin[2].training is expected[2].training


def test_a_copy_has_the_freeze_and_the_mode_that_a_norm_gets_while_it_measures():
    model = small()
    with watch(model, every=1):
        run_parts(model)
        freeze(model)
        model[1].mode = "golden"
        made = [copy.deepcopy(model), pickled(model)]
    for twin in made:
        assert not twin.train()[2].training
        assert not isinstance(twin[2], normplug.BatchNorm1d)
        assert twin[1].mode.name == model[1].mode.name == "golden"
        assert torch.equal(twin[1](torch.ones(2, 8)), model[1](torch.ones(2, 8)))


@pytest.mark.parametrize("run", [run_whole, run_parts])
def test_a_swap_inside_the_block_stays(run):
    model = small()
    with watch(model, every=1) as w:
        swap(model, "golden")
        run(model)
    assert model[1].mode.name == "golden"
    assert "watched_var" in dict(model[1].named_buffers())
    assert w.rows[0].target_variance == pytest.approx(GOLDEN)
    assert w.rows[0].output_variance == pytest.approx(GOLDEN, rel=1e-2)


def test_an_unswap_and_a_mode_that_is_set_inside_the_block_stay():
    model = swap(small())
    with watch(model, every=1) as w:
        normplug.unswap(model)
        run_whole(model)
    assert classes(model) == classes(small())
    assert [row.output_variance for row in w.rows] == pytest.approx([1.0, 1.0], rel=1e-2)
    with watch(model, every=1):
        run_parts(model)
        model[1].mode = 0.5
    assert model[1].target_variance == 0.5
    assert type(model[2]) is nn.BatchNorm1d


def test_an_error_in_the_forward_ends_the_measuring_of_its_step():
    model = small()
    before = classes(model)
    with watch(model, every=1) as w:
        with pytest.raises(RuntimeError):
            model(torch.randn(8, 3))
        assert classes(model) == before
        model(torch.randn(8, 4))
        try:
            model(torch.randn(8, 3))
        except RuntimeError:
            model(torch.randn(8, 4))  # a retry while the error is handled
    assert steps(w) == [1, 1, 3, 3]


def test_a_model_whose_forward_calls_the_model_itself_has_one_step_a_call():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x, depth=2):
            return self.norm(self(x, depth - 1)) if depth else x

    with watch(Recursive(), every=1) as w:
        for _ in range(2):
            w._model(torch.randn(3, 4))
    assert steps(w) == [0, 1]
    assert not math.isnan(w.rows[0].input_variance)


def in_threads(*functions):
    """Run functions, each in a thread of its own; return their errors."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_watch_models_of_their_own():
    def train():
        model = small()
        before = classes(model)
        with watch(model, every=2) as w:
            for _ in range(40):
                model(torch.randn(8, 4)).sum().backward()
        assert steps(w) == [step for step in range(0, 40, 2) for _ in "12"]
        assert not any(math.isnan(row.input_variance) for row in w.rows)
        assert_nothing_is_left(model, before)

    assert in_threads(train, train, train) == []


def test_a_swapped_model_is_watched_while_other_threads_run_it():
    model, ends = swap(small()), threading.Event()
    before = classes(model)

    def serve():
        while not ends.is_set():
            model(torch.randn(8, 4))

    def train():
        with ExitStack() as at_the_end:
            at_the_end.callback(ends.set)
            for _ in range(20):
                with watch(model, every=2) as w:
                    for _ in range(5):
                        model(torch.randn(8, 4)).sum().backward()
                    # Forwards during a step of another thread are no steps.
                    while not w.rows:
                        model(torch.randn(8, 4)).sum().backward()

    assert in_threads(serve, serve, train) == []
    assert_nothing_is_left(model, before)


@pytest.mark.parametrize("run", [run_whole, run_parts])
def test_frozen_norms_are_measured(run):
    model = small()
    model[2].running_var.fill_(4.0)
    normplug.freeze(model.eval()).train()
    with watch(model, every=1) as w:
        run(model)
    normed, frozen = (row.output_variance for row in w.rows)
    assert normed == pytest.approx(1.0, rel=1e-2)
    assert frozen < 0.5


@STOCK_OR_SWAPPED
def test_steps_that_are_not_read_yet_keep_only_the_averages(change):
    model = change(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))
    watches = [watch(model, every=1), watch(model, every=1, details=True)]
    with watches[0], watches[1]:
        for _ in range(2):
            model(torch.randn(8, 4)).sum().backward()
    gc.collect()
    assert not any(isinstance(held, Measured) for held in gc.get_objects())
    assert [w.rows[0].weight_rms for w in watches] == [1.0, 1.0]
    assert watches[1].rows[0].gradient == 1.0


def test_without_a_measured_step_there_is_an_empty_table_and_a_warning(tmp_path):
    model, w = small(), watch(small(), every=1)
    assert (w.rows, w.table()) == ([], "")
    w.to_csv(tmp_path / "v.csv")
    assert rows_of(tmp_path / "v.csv") == []
    with pytest.raises(ValueError, match="watch: plot needs at least one measured step"):
        w.plot(tmp_path / "v.png")
    with (
        pytest.warns(UserWarning, match="watch: nothing was measured: no norm"),
        watch(model),
    ):
        model.eval()(torch.randn(8, 4))
    with pytest.raises(RuntimeError, match="watch: this watch is already running"), w, w:
        pass


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="watch: every must be at least 1; got 0"):
        watch(net(), every=0)
    with pytest.raises(TypeError, match="watch: model must be an nn.Module"):
        watch(3)
