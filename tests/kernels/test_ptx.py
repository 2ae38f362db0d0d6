"""The comparison of the kernels of two checkouts names each difference."""

import json

import pytest

triton = pytest.importorskip("triton")

import ptx
from normplug._kernels import launch

pytestmark = [
    pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(
        not launch.BUILDS, reason="on this Triton the kernels are not used"
    ),
]


def test_two_dumps_differ_where_a_kernel_or_a_size_does(tmp_path, monkeypatch):
    label = "batch_norm_columns_forward: float64, own rows, statistics, forward"
    monkeypatch.setattr(
        ptx,
        "every_launch",
        lambda chosen=ptx.every_launch: (each for each in chosen() if each[0] == label),
    )
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        ptx.dump(folder, "statistics", every=1, processes=1)
    assert ptx.compare(before, after) == []
    kernel = after / f"{label}.ptx"
    assert ".visible .entry batch_norm_columns_forward" in kernel.read_text()
    kernel.write_text(kernel.read_text().replace("add.f64", "sub.f64"))
    facts = json.loads((after / "launches.json").read_text())
    facts[label]["numbers"]["C"] += 1
    (after / "launches.json").write_text(json.dumps(facts))
    one, other = ptx.compare(before, after)
    assert one.startswith(f"{label}: numbers: ")
    assert other == f"{label}: the PTX differs"
