import pytest

pytest.importorskip("lightning.pytorch")

import math
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_cases
import normplug
from accuracy import assert_same_bits
from lightning_cases import trainer
from normplug import target_variance
from normplug._convert import fused_modules
from normplug.lightning import SwapNorms, VarianceLogger
from programs import program
from statistics_cases import rows_of

STEPS = 6
IMAGES = torch.randn(48, 3, 6, 6) * 3 + 5
LABELS = torch.randint(4, (48,))


def make_net():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 8, 3),
        nn.Flatten(),
        nn.LayerNorm(128),
        nn.Linear(128, 4),
    )
    nn.init.normal_(net[0].weight, 1, 0.5)
    return net


Module = partial(lightning_cases.Module, make_net)


def loader():
    return DataLoader(TensorDataset(IMAGES, LABELS), 8)


def test_callbacks_gathers_those_of_lightning_and_of_transformers():
    from normplug import callbacks

    pytest.importorskip("transformers")
    assert callbacks.SwapNorms is SwapNorms
    assert callbacks.NormCallback is normplug.transformers.NormCallback
    assert {"NormCallback", "SwapNorms", "SyncNorms", "VarianceLogger"} < set(
        dir(callbacks)
    )
    with pytest.raises(AttributeError, match="callbacks' has no attribute 'Swap'"):
        _ = callbacks.Swap


def test_callbacks_names_the_extra_of_a_library_that_is_not_installed():
    code = """
from importlib.util import find_spec
import normplug
shown = dir(normplug.callbacks)
assert ("NormCallback" in shown) == (find_spec("transformers") is not None)
assert "SwapNorms" not in shown
try:
    from normplug.callbacks import SwapNorms
except ImportError as error:
    print(error)
"""
    done = program(code, hidden=["lightning"])
    expected = (
        'normplug.lightning needs lightning.pytorch: pip install "normplug[lightning]"'
    )
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("late", [False, True])
def test_swap_norms_swaps_even_layers_of_configure_model_before_the_optimizer(
    tmp_path, late
):
    module = Module(late=late)
    trainer(tmp_path, SwapNorms("golden", exclude="net.3")).fit(module, loader())
    assert type(module.net[0]) is normplug.BatchNorm2d
    assert type(module.net[3]) is nn.LayerNorm
    optimizer = module.trainer.optimizers[0]
    assert any(p is module.net[0].weight for p in optimizer.param_groups[0]["params"])


@pytest.mark.filterwarnings("ignore:normplug. a checkpoint of mode:UserWarning")
def test_swap_norms_keeps_the_mode_of_each_layer_in_the_checkpoint(tmp_path):
    path, modes = tmp_path / "last.ckpt", {"net.0": 0.5, "*": "golden"}
    run, logger = trainer(tmp_path, SwapNorms(modes)), VarianceLogger(1, tmp_path)
    run.fit(Module(), loader())
    run.save_checkpoint(path)
    same = SwapNorms(lambda p, m: modes.get(p, "golden"))
    trainer(tmp_path, same, logger, max_epochs=2).fit(Module(), loader(), ckpt_path=path)
    targets = [row.target_variance for row in logger.last]
    assert targets == [0.5, target_variance("golden")]
    others = {"net.0 in mode 0.5, now golden": "golden", "net.3 in mode g": {"*": 2}}
    for text, other in others.items():
        resumed = trainer(tmp_path, SwapNorms(other), max_epochs=2)
        with pytest.raises(ValueError, match=f"trained in other modes: .*{text}"):
            resumed.fit(Module(), loader(), ckpt_path=path)


class Blocks(lightning_cases.Module):
    """Its own forward calls a norm and an activation."""

    def __init__(self):
        super().__init__(make_net)
        self.norm, self.relu = nn.BatchNorm1d(4), nn.ReLU()

    def forward(self, x):
        return self.relu(self.norm(self.net(x)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])


def test_swap_norms_fuses_and_trains_to_the_same_weights_and_checkpoint(tmp_path):
    saved = []
    for fused in (False, True):
        torch.manual_seed(0)
        module, path = Blocks(), tmp_path / "last.ckpt"
        run = trainer(tmp_path, SwapNorms("golden", fuse=fused))
        run.fit(module, loader())
        assert len(fused_modules(module)) == fused
        run.save_checkpoint(path)
        saved.append(torch.load(path)["state_dict"])
        resumed = trainer(tmp_path, SwapNorms("golden", fuse=not fused), max_epochs=2)
        resumed.fit(Blocks(), loader(), ckpt_path=path)
        normplug.unswap(module)
        assert type(module) is Blocks
    assert_same_bits(*saved)


def test_swap_norms_is_standard_by_default_and_warns_of_no_run_that_starts_or_resumes(
    tmp_path,
):
    assert str(SwapNorms().mode) == "standard"
    path = tmp_path / "last.ckpt"

    def fresh():
        return lightning_cases.Module(
            lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(108))
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "normplug")
        run = trainer(tmp_path, SwapNorms("golden"))
        run.fit(fresh(), loader())
        run.save_checkpoint(path)
        resumed = trainer(tmp_path, SwapNorms("golden"), max_epochs=2)
        resumed.fit(fresh(), loader(), ckpt_path=path)
        resumed.test(fresh(), loader(), ckpt_path=path)
        stock = fresh()
        trainer(tmp_path).fit(stock, loader())
        trainer(tmp_path, SwapNorms()).fit(stock, loader())
    with pytest.warns(UserWarning, match="normplug.swap: trained norms"):
        trainer(tmp_path, SwapNorms("golden")).fit(stock, loader())


def test_warm_up_is_deprecated_and_does_nothing():
    model = nn.Linear(2, 2)
    with pytest.warns(DeprecationWarning, match="normplug.warm_up: .* Remove the call"):
        assert normplug.warm_up(model, torch.ones(2, 2)) is None
    with pytest.warns(DeprecationWarning, match="SwapNorms: warm_up .* Omit it"):
        SwapNorms(warm_up=True)


def test_swap_norms_rejects_wrong_options_at_once():
    for error, message, options in (
        (TypeError, "SwapNorms: fuse must be True or False; got 'yes'", {"fuse": "yes"}),
        (ValueError, "recompute=True needs fuse=True", {"recompute": True}),
        (TypeError, "options are fuse, recompute, include", {"fused": True}),
    ):
        with pytest.raises(error, match=message):
            SwapNorms(**options)


def test_swap_norms_detects_that_another_tool_rebuilt_a_layer(tmp_path):
    module = Module()
    run = trainer(tmp_path, SwapNorms("golden"))
    run.fit(module, loader())
    module.net[0] = nn.BatchNorm2d(3)
    with pytest.raises(
        RuntimeError, match=r"net\.0: swapped in mode golden, now a BatchNorm2d"
    ):
        run.test(module, loader())


@pytest.mark.parametrize("mode", [None, "golden"])
@pytest.mark.parametrize("compiled", [False, True])
def test_variance_logger_writes_each_layers_variances_at_every_few_steps(
    tmp_path, mode, compiled
):
    torch.compiler.reset()
    module, logger = Module(), VarianceLogger(every_n_steps=4, dirpath=tmp_path)
    tv = 1.0 if mode is None else target_variance(mode)
    layers = module.net[0], module.net[3]
    if mode is not None:
        normplug.swap(module, mode)
    if compiled:
        module.net.compile(backend="aot_eager")
    classes = [type(layer) for layer in layers]
    trainer(tmp_path, logger).fit(module, loader())

    table = rows_of(tmp_path / "variance.csv")
    assert [int(row["step"]) for row in table] == [0, 0, 4, 4]
    assert [row["layer"] for row in table[:2]] == ["net.0", "net.3"]
    assert [row["depth"] for row in table[:2]] == ["0", "1"]
    for row in table:
        assert float(row["output_variance"]) == pytest.approx(tv, rel=1e-3)
        assert float(row["target_variance"]) == tv
    variance = IMAGES[:8].var((0, 2, 3), correction=0).mean().item()
    assert float(table[0]["input_variance"]) == pytest.approx(variance, rel=1e-4)
    assert [type(layer) for layer in layers] == classes
    assert all("_probe" not in vars(layer) for layer in layers)
    assert (tmp_path / "variance.png").stat().st_size > 10_000
    assert logger.table().splitlines()[0] == "variance at step 4"


@pytest.mark.parametrize("mode", [None, "golden"])
def test_second_moments_are_logged_for_a_norm_that_does_not_centre(mode, tmp_path):
    layers = nn.Flatten(), nn.RMSNorm(108), nn.LayerNorm(108), nn.Linear(108, 4)
    module = lightning_cases.Module(lambda: nn.Sequential(*layers))
    logger = VarianceLogger(STEPS, tmp_path)
    if mode is not None:
        normplug.swap(module, mode)
    trainer(tmp_path, logger).fit(module, loader())
    measures = [row["measure"] for row in rows_of(tmp_path / "variance.csv")]
    assert measures == ["second moment", "variance"]
    first, tv = logger.last[0], target_variance(mode or "standard")
    assert first.output_variance == pytest.approx(tv, rel=1e-3)
    assert first.input_variance > 30  # the mean is 5
    head, moment, _ = (line.split() for line in logger.table().splitlines()[1:])
    assert (head[-1], moment[-1]) == ("measure", "moment")


def test_measuring_changes_no_result_and_unlogged_steps_measure_nothing(tmp_path):
    results, measures = [], []
    for callbacks in ([], [VarianceLogger(3, tmp_path)]):
        module = normplug.swap(Module(), "golden", preserve_output=False)
        for layer in (module.net[0], module.net[3]):
            layer.register_forward_hook(
                lambda layer, *_: measures.append(layer._probe is not None)
            )
        trainer(tmp_path, *callbacks).fit(module, loader())
        results.append(module.net.state_dict())
    assert_same_bits(*results)
    logged = [step % 3 == 0 for step in range(STEPS) for _ in range(2)]
    assert measures == [*len(logged) * [False], *logged]


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_the_loggers_get_the_numbers_and_a_new_fit_starts_a_new_file(tmp_path):
    for _ in range(2):
        module, logger = Module(), CSVLogger(tmp_path, name="", version="run")
        normplug.swap(module, 0.25)
        trainer(tmp_path, VarianceLogger(5), logger=logger).fit(module, loader())
        assert len(rows_of(tmp_path / "run" / "variance.csv")) == 4
    rows = [
        r for r in rows_of(tmp_path / "run" / "metrics.csv") if r["variance/net.0/output"]
    ]
    assert [row["step"] for row in rows] == ["0", "5"]
    assert float(rows[0]["variance/net.0/output"]) == pytest.approx(0.25, rel=1e-3)


def test_a_layer_that_never_runs_is_logged_as_nan_and_an_exception_ends_all_measuring(
    tmp_path,
):
    module, logger = Module(), VarianceLogger(1, tmp_path)
    module.spare = nn.LayerNorm(3)
    trainer(tmp_path, logger, max_steps=1).fit(module, loader())
    assert math.isnan(logger.last[2].input_variance)

    def fail(*args):
        raise ZeroDivisionError

    module.net.forward = fail
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, logger).fit(module, loader())
    assert type(module.spare) is nn.LayerNorm
    assert vars(module.spare).keys() == vars(nn.LayerNorm(3)).keys()


def test_torchs_sync_batch_norm_is_not_measured_but_normplugs_is(tmp_path):
    module, logger = Module(), VarianceLogger(1, tmp_path)
    module.net[0] = nn.SyncBatchNorm(3)
    trainer(tmp_path, logger, max_steps=1).fit(module, loader())
    assert [row.layer for row in logger.last] == ["net.3"]
    normplug.swap(module, 0.25)
    trainer(tmp_path, logger, max_steps=1).fit(module, loader())
    assert [row.kind for row in logger.last] == ["SyncBatchNorm", "LayerNorm"]
    assert logger.last[0].output_variance == pytest.approx(0.25, rel=1e-3)


def test_a_watch_around_a_fit_and_a_logger_in_it_both_measure(tmp_path):
    for change in (lambda m: m, normplug.swap):
        module, logger = change(Module()), VarianceLogger(2, tmp_path)
        classes = [type(m) for m in module.modules()]
        with normplug.watch(module, every=3) as w:
            trainer(tmp_path, logger).fit(module, loader())
        assert {row.step for row in w.rows} == {0, 3}
        logged = {int(row["step"]) for row in rows_of(tmp_path / "variance.csv")}
        assert logged == {0, 2, 4}
        assert not any(math.isnan(row.input_variance) for row in [*w.rows, *logger.last])
        assert [type(m) for m in module.modules()] == classes
