"""What reports look like, and what an error proposes."""

import io
import os
import sys

import pytest
from torch import nn

import normplug


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(4)
        self.act = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())


@pytest.fixture
def net():
    return nn.ModuleDict(
        {"layers": nn.ModuleList(Block() for _ in range(12)), "norm": nn.LayerNorm(4)}
    )


def test_equal_rows_are_one_line(net):
    lines = str(normplug.plan(net)).splitlines()
    assert [line.split() for line in lines[1:-1]] == [
        [
            "layers.{0..11}.input_layernorm",
            "x12",
            "LayerNorm",
            "normplug.LayerNorm",
            "standard",
        ],
        [
            "layers.{0..11}.act.0",
            "x12",
            "BatchNorm1d",
            "normplug.BatchNorm1d",
            "standard",
        ],
        ["norm", "LayerNorm", "normplug.LayerNorm", "standard"],
    ]
    assert lines[-1].startswith("25 of 25 norm layers")
    normplug.swap(net, {"layers.5.*": 0.5, "*": 1})
    paths = [line.split()[0] for line in str(normplug.check(net)).splitlines()]
    assert "layers.{0..4}.act.0" in paths
    assert "layers.5.act.0" in paths
    assert "layers.{6..11}.act.0" in paths


def test_rows_of_nested_blocks_are_one_line_with_the_path_of_what_fuses_them():
    stages = {
        f"stage{i}": nn.Sequential(*(Block() for _ in range(3))) for i in range(1, 5)
    }
    net = normplug.fuse(normplug.swap(nn.ModuleDict(stages)))
    lines = [line.split() for line in str(normplug.fusions(net)).splitlines()]
    where = "stage{1..4}.{0..2}.act"
    assert [f"{where}.0", "x12", "BatchNorm1d", "ReLU", "in", where] in lines


def test_a_line_has_at_most_120_columns(net):
    net["a" * 40] = nn.LocalResponseNorm(2)  # a long path, and a reason
    # Where it is fused, in one word.
    net["b" * 50] = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())
    normplug.swap(net)
    for report in (normplug.plan(net), normplug.fusions(net)):
        assert max(map(len, str(report).splitlines())) <= 120


class Terminal(io.StringIO):
    def fileno(self):
        return 1


@pytest.mark.parametrize(("terminal", "columns"), [(40, 80), (100, 100), (200, 120)])
def test_a_report_is_as_wide_as_the_terminal(net, monkeypatch, terminal, columns):
    net["long_" * 8] = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())
    report = normplug.fusions(normplug.swap(net))
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(
        os, "get_terminal_size", lambda _: os.terminal_size((terminal, 9))
    )
    lines = str(report).splitlines()
    assert columns - 30 < max(map(len, lines)) <= columns
    if columns == 80:  # a line for each cell
        assert lines[8:11] == ["norm", "  class       LayerNorm", "  fused with  -"]
    else:
        assert lines[0].split()[:4] == ["path", "class", "fused", "with"]


def test_a_report_is_a_table_in_a_notebook_and_a_data_frame(net):
    pytest.importorskip("pandas")
    normplug.swap(net)
    for report in (normplug.plan(net), normplug.fusions(net), normplug.check(net)):
        assert report._repr_html_().startswith("<pre>path ")
        frame = report.to_pandas()
        assert len(frame) == len(report) == 25
        assert frame["path"][0] == "layers.0.input_layernorm"


def test_a_filter_that_matches_nothing_gets_a_proposal(net):
    with pytest.raises(ValueError, match=r'Did you mean "layers\.\*"\?$'):
        normplug.swap(net, include="layers")
    with pytest.raises(
        ValueError, match=r'Did you mean "re:layers\\.\\d\+\\.act\\.0"\?$'
    ):
        normplug.swap(net, include=r"layers\.\d+\.act\.0")
    with pytest.raises(ValueError, match=r"in all\)\.$"):
        normplug.swap(net, include="nothing")


def test_a_number_in_quotes_is_named():
    with pytest.raises(
        ValueError, match=r"got '0\.5'\. Give the number itself, .*: 0\.5\."
    ):
        normplug.swap(nn.LayerNorm(4), mode="0.5")


def test_fuse_before_swap_and_unswap_without_swap_say_so(net):
    with pytest.warns(UserWarning, match=r"Call normplug\.swap\(model\) first\.$"):
        normplug.fuse(net)
    with pytest.warns(
        UserWarning, match="ModuleDict has no normplug layers: it was not swapped"
    ):
        normplug.unswap(net)


def test_a_fused_block_says_so():
    block = normplug.fuse(normplug.swap(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())))
    assert repr(block).splitlines()[1] == "  fused"
    assert "fused" not in repr(normplug.unfuse(block))
