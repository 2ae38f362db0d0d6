"""The scripts of `benchmarks/`, briefly on the CPU, and the documentation that they write."""

import json
import socket
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ddp
import first_step
import host
import kernels
import models
import nets
import normplug
import rivals
import sync
import tables
from forks import forked
from normplug._ops.recompute import AVAILABLE
from normplug.bench import targets, timing
from normplug.bench.ops import Case, Problem, cases
from normplug.bench.rows import read_file

CPU = torch.device("cpu")
TINY = {
    "encoder_6x256": {"length": 4, "width": 16},
    "nnunet3d": {"size": 8, "widths": (4, 8)},
    "resnet18-cifar": {},
    "gpt2": {"length": 8, "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50},
    "t5_small": {"length": 8, "target": 4, "num_layers": 1, "d_model": 16, "vocab_size": 50},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(timing, "TURN_MS", 0.1)


@pytest.mark.parametrize("page", sorted(tables.DOCS.glob("*_h100.md")), ids=lambda page: page.stem)
def test_a_committed_page_is_that_of_its_committed_results(page):
    assert tables.text_of(page) == page.read_text()


def test_every_committed_result_and_picture_is_linked_from_a_page():
    pages = "".join(page.read_text() for page in tables.DOCS.glob("*.md"))
    for path in (*(tables.DOCS / "results").iterdir(), *tables.DOCS.rglob("*.png")):
        assert f"({path.relative_to(tables.DOCS).as_posix()})" in pages, path


def test_new_rows_make_a_table_too():
    row = {"device": "a GPU", "torch": "2.15", "commit": "abc", "date": "2026-11-25T01:02:03"}
    call = row | {"op": "layer_norm", "layout": "rows", "shape": "9x8", "dtype": "float32"}
    call |= {"direction": "F", "floor_passes": 2, "copy_gbps": 2000.0, "wall_us": 9.0}
    rows = [call | {"provider": "normplug", "us": 4.0, "gbps": 1000.0, "max_rel": 2e-7}]
    rows.append(call | {"provider": "eager", "us": 6.0, "gbps": 500.0, "date": "2026-11-26T01"})
    lines = tables.render(rows).splitlines()
    assert lines[0].startswith("a GPU, torch 2.15, commit abc, 2026-11-25 to 2026-11-26. Copy: 20")
    assert "| layer_norm | F | rows | 9x8 | float32 | 50% (4.0) | 25% (6.0) | 1.50x |" in lines
    assert lines[-1].endswith("| float32 | **2.0e-07** |")
    step = {**row, "model": "net", "batch": 8, "mode": "golden", "arm": "eager", "ms": 20.0}
    lines = tables.render([step | {"groups_ms": {"norm": 4.0, "copy": 5.0}}]).splitlines()
    assert "bfloat16 autocast, SGD, momentum 0.9; swapped in mode golden." in lines[0]
    assert "| net | 8 | 20.00 ms, 400/s |" in lines
    assert "| net | 8 | eager | 4.00 | 5.00 | 9.00 | - |" in lines


def test_a_suite_writes_rows(tmp_path):
    words = ["--suite", "small", "--only", "layer_norm rows 32x128 float32", "--device", "cpu"]
    path = tmp_path / "rows.json"
    kernels.main([*words, "--provider", "normplug", "--provider", "eager", "--json", str(path)])
    rows = read_file(path)
    assert {row["op"] for row in rows} == {"layer_norm", "add_layer_norm"}
    assert {row["suite"] for row in rows} == {"small"}
    with pytest.raises(SystemExit, match="no case of suite headline has 'nonsense'"):
        kernels.main(["--only", "nonsense", "--device", "cpu"])


def test_a_rival_is_timed_if_it_is_installed(monkeypatch):
    monkeypatch.setitem(rivals.MODULES, "flaggems", "torch")
    monkeypatch.setitem(rivals.MODULES, "quack", "no_such_module")
    assert "quack" not in rivals.of("layer_norm")
    assert list(rivals.of("rms_norm", ["flaggems"])) == ["flaggems"]
    # Stand-ins of the same signatures.
    monkeypatch.setattr(torch, "cudnn_batch_norm", lambda *t: [torch.batch_norm(*t, False)])
    norm, backward = torch.native_layer_norm, torch.ops.aten.native_layer_norm_backward
    gems = SimpleNamespace(layer_norm=norm, layer_norm_backward=backward)
    monkeypatch.setitem(sys.modules, "flag_gems", gems)
    for provider, case in (
        ("cudnn", Case("batch_norm_add_relu", "NCHW", (2, 4, 3, 3), "float32")),
        ("flaggems", Case("layer_norm", "rows", (4, 8), "float32")),
    ):
        problem = Problem(case, CPU)
        found = problem.results(rivals.of(case.op)[provider])
        for name, value in problem.results(problem.op.theirs).items():
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("name", TINY)
def test_the_users_command_takes_a_network_of_the_docs(name):
    if library := nets.NETS[name].library:
        pytest.importorskip(library)
    assert isinstance(getattr(nets, name), partial)  # it has a batch of its own
    model, batch, loss = targets.load(f"{nets.__file__}:{name}", 2, TINY[name])
    value = loss(model, batch)
    value.backward()
    assert value.isfinite()
    assert all(row.module.weight.grad is not None for row in normplug.plan(model))


def test_every_network_says_which_library_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(models, "find_spec", lambda library: None)
    found = [name for name, _ in models.selected(["all"], None)]
    assert found == ["encoder_6x256", "nnunet3d"]
    assert "resnet50 is left out: it needs torchvision" in capsys.readouterr().err


def test_other_arms_differ_from_the_usual_as_their_names_say(tmp_path, monkeypatch):
    body = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    net = nn.Sequential(*body, nn.Linear(4 * 30**2, 10))
    make = partial(nets.images, "", size=32, model=net)
    monkeypatch.setitem(nets.NETS, "nnunet3d", nets.Net(make, (2,), None))
    path = tmp_path / "rows.json"
    words = ["--rows", "nnunet3d", "--device", "cpu", "--rounds", "1", "--json", str(path)]
    models.main([*words, "--arms", "eager", "swap+fuse", "no-norm", "swap+fuse+recompute", "liger"])
    rows = {row["arm"]: row for row in read_file(path)}
    refused = {name for name, row in rows.items() if row["error"]}
    # The model is no Llama, and recomputation needs torch 2.8.
    assert refused == {"liger"} | (set() if AVAILABLE else {"swap+fuse+recompute"})
    losses = [row["loss"] for name, row in rows.items() if "fuse" in name and not row["error"]]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)
    assert rows["no-norm"]["loss"] != pytest.approx(rows["eager"]["loss"])
    assert type(models.without_norms(nn.Sequential(nn.LayerNorm(3)))[0]) is nn.Identity


def test_kernels_are_grouped_by_name():
    names = {
        "norm": ["void cudnn::bn_fw_tr_1C11_singleread_kernel_NCHW", "_norm_rows_forward"],
        "conv/gemm": ["sm90_xmma_fprop_implicit_gemm_bf16", "triton_tem_fused_mm_0"],
        "elementwise": ["at::native::vectorized_elementwise_kernel<4>", "triton_poi_fused_relu_2"],
        "copy": ["Memcpy DtoD (Device -> Device)", "triton_poi_fused__to_copy_3"],
        "optimizer": ["void multi_tensor_apply_kernel", "multi_tensor_apply"],
        "other": ["normalize_channels", "triton_red_fused_sum_1"],
    }
    events = [{"name": name, "dur": 3e3} for found in names.values() for name in found]
    ms = dict.fromkeys(models.GROUPS, 6.0 / timing.STEPS)
    assert models.groups_ms(events) == {"groups_ms": pytest.approx(ms)}
    assert models.group("triton_red_fused_native_layer_norm_1") == "norm"


def test_a_first_step_is_timed_in_a_process_of_its_own(tmp_path, monkeypatch):
    make = partial(nets.encoder, length=4, width=16)
    monkeypatch.setitem(nets.NETS, "encoder_6x256", nets.Net(make, (2,), None))
    monkeypatch.setattr(first_step, "in_a_process", first_step.measured)
    path = tmp_path / "rows.json"
    words = ["--rows", "encoder_6x256", "--device", "cpu", "--warm-up"]
    first_step.main([*words, "--json", str(path)])
    rows = read_file(path)
    assert [row["arm"] for row in rows] == ["eager", "swap+fuse"]
    for row in rows:
        assert row["first_step_s"] > 0
        assert row["first_step_kernels"]["distinct"] == 0  # torch's own run on a CPU


@pytest.mark.parametrize("name", ["add_layer_norm", "batch_norm_relu"])
def test_single_calls_are_compared_before_they_are_timed(name, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "CASES", cases([name], [(4, 8)], ["float32"]))
    path = tmp_path / "rows.json"
    host.main(["--device", "cpu", "--json", str(path)])
    rows = read_file(path)
    assert [row["provider"] for row in rows] == 2 * [host.EAGER, host.OURS, host.PYTHON]
    assert [row["direction"] for row in rows] == 3 * ["F"] + 3 * ["F+B"]
    assert all(row["wall_us"] > 0 for row in rows)
    wrong = (lambda norm, x: norm(x)), (lambda norm, x: 1.1 * norm(x))
    monkeypatch.setattr(host, "_calls", lambda op: wrong)
    with pytest.raises(AssertionError, match="a result differs from eager's by 0.1"):
        list(host.measure(Case("batch_norm", "NC", (4, 8), "float32"), CPU))


BOTH = """
import os, sys, torch
from functools import partial
from types import SimpleNamespace

def process(rank, path):
    import nets, sync
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
    body = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()
    net = torch.nn.Sequential(*body, torch.nn.Linear(64, 1000))
    nets.NETS["resnet50"] = nets.Net(partial(nets.images, "", model=net), (2,))
    short = ["--batch", "3", "--size", "6", "--warm-ups", "1", "--rounds", "1", "--turn", "1"]
    sync.main([*short, "--json", path])

sys.path.insert(0, sys.argv[1])
torch.multiprocessing.start_processes(process, (sys.argv[0],), nprocs=2, start_method="fork")
"""


def test_steps_over_two_processes_have_a_row_for_each_arm(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    path = tmp_path / "rows.json"
    done = forked(BOTH, path, tables.DOCS.parent / "benchmarks", environment=where)
    assert done.returncode == 0, done.stderr
    rows = read_file(path)
    # torch's SyncBatchNorm needs CUDA.
    assert {row["arm"] for row in rows} == set(sync.ARMS) - {"torch"}
    assert all((row["batch"], row["processes"]) == (3, 2) and row["ms"] > 0 for row in rows)


def test_a_run_over_gpus_that_fails_has_a_row_with_its_error(tmp_path, capsys):
    pytest.importorskip("torchvision")
    path = tmp_path / "rows.json"
    tiny = ["data=fake", "data.num_images=100", "data.image_size=8", "data.batch_size=16"]
    tiny += ["data.device=cpu", "trainer.accelerator=cpu", "trainer.max_epochs=1"]
    ddp.main([*tiny, "--gpus", "1", "--seeds", "3", "--json", str(path)])
    eager, graphed = read_file(path)
    assert eager["test_accuracy"] > 0
    assert {"gpus": 1, "graph": False, "seed": 3, "learning_rate": 0.4}.items() <= eager.items()
    assert "graph=true needs an NVIDIA GPU" in graphed["error"]
    assert graphed["error"] in capsys.readouterr().err


def test_a_picture_has_the_runs_that_have_finished(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"gpus": n, "graph": g, "images_per_s": 10.0 * n} for n in (1, 2) for g in (False, True)
    ]
    path, picture = tmp_path / "rows.json", tmp_path / "ddp.png"
    path.write_text(json.dumps([*rows, {"gpus": 4, "graph": True, "error": "it failed"}]))
    ddp.main(["--json", str(path), "--plot", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_a_step_may_be_one_cuda_graph(monkeypatch):
    make = partial(nets.encoder, length=4, width=16)
    monkeypatch.setitem(nets.NETS, "encoder_6x256", nets.Net(make, (2,), None))
    rows = models.measure(
        "encoder_6x256", 2, ["eager", "eager+graph", "swap+fuse+graph"], 2, "cuda"
    )
    assert all(row["error"] is None for row in rows)
    assert all(sum(row["groups_ms"].values()) > 0 for row in rows)
