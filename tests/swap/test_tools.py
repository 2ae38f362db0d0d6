"""Opacus, which judges and replaces layers by their exact class; `matrix.py` runs other tools."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
from matrix import BATCHES, private
from normplug import BatchNorm2d, LayerNorm, swap

pytest.importorskip("opacus")
from opacus.validators import ModuleValidator  # noqa: E402


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["golden", "standard", 0.3])
def test_opacus_fixes_a_swapped_model_and_trains_it(mode):
    torch.manual_seed(0)
    body = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LayerNorm(128)
    model = swap(nn.Sequential(*body, nn.Linear(128, 4)), mode).train()
    (error,) = ModuleValidator.validate(model)
    assert type(error).__name__ == "ShouldReplaceModuleError"
    fixed = ModuleValidator.fix(model)
    kinds = [nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.Flatten, LayerNorm, nn.Linear]
    assert [type(m) for m in fixed] == kinds
    assert fixed[4].target_variance == normplug.target_variance(mode)
    assert ModuleValidator.is_valid(fixed)
    assert hasattr(model[4], "watched_mean")  # `fix` works on a copy

    (x, y), twin = BATCHES[0], copy.deepcopy(fixed)
    model, optimizer = private(fixed, torch.optim.SGD(fixed.parameters(), 0.1))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    F.cross_entropy(twin(x), y).backward()
    torch.optim.SGD(twin.parameters(), 0.1).step()
    ours, theirs = list(fixed.parameters()), list(twin.parameters())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_opacus_fixes_every_class_whose_stock_class_it_knows():
    swap(nn.LayerNorm(4), "golden")  # registers with Opacus, now that it is imported
    batch_norms = [normplug.BatchNorm1d, BatchNorm2d, normplug.BatchNorm3d, normplug.SyncBatchNorm]
    lazy = swap(nn.Sequential(nn.LazyBatchNorm2d()), "golden")
    lazy(torch.randn(2, 4, 3, 3))
    synchronised = swap(nn.Sequential(nn.BatchNorm2d(4)), "golden", sync=True)
    for model in (lazy, synchronised, *(nn.Sequential(ours(4)) for ours in batch_norms)):
        assert type(ModuleValidator.fix(model)[0]) is nn.GroupNorm
    pairs = ((normplug.BatchNorm1d, nn.InstanceNorm1d), (BatchNorm2d, nn.InstanceNorm2d))
    for ours, instance_norm in pairs:
        assert type(ModuleValidator.fix(ours(4), replace_bn_with_in=True)) is instance_norm
    assert not ModuleValidator.is_valid(synchronised)
