"""`python -m normplug run`: programs with it and without it, and what it does with a model."""

import copy
import json
import os
import pickle
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

import normplug
from normplug import LayerNorm
from normplug import __main__ as entry
from normplug._convert import fused_modules
from normplug._run import command, program
from programs import ROOT
from programs import program as run_code

SITE = str(ROOT / "normplug" / "_run" / "site")
PROGRAM = """
import copy, os, sys
# Torch 2.6 adds a new temporary folder.
paths = [path for path in sys.path if not os.path.basename(path).startswith("tmp")]
print(sys.argv, paths, __name__, __spec__, sys.flags.bytes_warning, sys.stdin.read())

import multiprocessing
import torch
from torch import nn
from torch.utils.data import DataLoader

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.LayerNorm(8)])

    def forward(self, x):
        y = torch.relu(self.norms[0](self.conv(x)))
        return self.norms[1](y.mean((2, 3)))

def trained(seed):
    torch.manual_seed(seed)
    net = Net().to("cpu")
    average = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for batch in DataLoader(torch.randn(8, 3, 6, 6), 4, num_workers=seed):
        optimizer.zero_grad()
        net(batch).pow(3).sum().backward()
        optimizer.step()
    return net, average

def child(folder, seed):
    torch.save(trained(seed), f"{folder}/child{seed}.pt")

if __name__ == "__main__":
    folder = sys.argv[1]
    torch.save(trained(1), f"{folder}/model.pt")
    for seed, start in enumerate(("spawn", "fork")):
        process = multiprocessing.get_context(start).Process(target=child, args=(folder, seed))
        process.start()
        process.join()
        assert process.exitcode == 0
    if os.fork() == 0:
        sys.exit()
    os.wait()
    raise KeyError("the end")
"""
SAME = """
import sys, torch
sys.path.insert(0, sys.argv[0])
import __main__, script
__main__.Net = script.Net
for name in ("model.pt", "child0.pt", "child1.pt"):
    stock, run = (torch.load(f"{f}/{name}", weights_only=False) for f in sys.argv[1:])
    for one, two in zip(stock, run):
        assert str(one) == str(two)
        assert [vars(m).keys() for m in one.modules()] == [vars(m).keys() for m in two.modules()]
        assert [*map(type, one.modules())] == [*map(type, two.modules())]
        states = one.state_dict(), two.state_dict()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
"""


def python(*words, environment=(), **how):
    """Run Python in a process of its own."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **variables, **dict(environment)},
        capture_output=True,
        text=True,
        **how,
    )


RUN = ("-m", "normplug", "run", "--devices", "any")


def test_a_program_and_its_files_are_the_same_and_need_no_normplug(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    folders = [tmp_path / "stock", tmp_path / "run"]
    for folder in folders:
        folder.mkdir()
    report = tmp_path / "report.txt"
    options = ("--report", report, script)
    stock = python("-b", script, folders[0], "--mode", "x", input="in")
    run = python("-b", *RUN, *options, folders[1], "--mode", "x", input="in")
    assert run.stdout.replace(str(folders[1]), str(folders[0])) == stock.stdout
    assert "in" in stock.stdout
    assert run.stderr == stock.stderr
    assert stock.stderr.endswith("KeyError: 'the end'\n")
    assert run.returncode == stock.returncode == 1
    same = run_code(SAME, tmp_path, *folders, hidden=["normplug"])
    assert same.returncode == 0, same.stderr
    lines = report.read_text().splitlines()
    assert lines.count("normplug run, mode standard") == 2  # and of the spawned process
    assert lines[2].split() == ["1", "Net", "2", "2", "1", "none"]


LAUNCHED = """
import os, torch
from torch import distributed, nn
distributed.init_process_group("gloo")
net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))
ddp = nn.parallel.DistributedDataParallel(net)
ddp(torch.randn(2, 3, 4, 4)).sum().backward()
print(type(net[3]))
distributed.destroy_process_group()
"""


def test_a_launcher_starts_it_and_the_first_process_reports(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = python(*RUN, *torchrun, script)
    assert done.returncode == 0, done.stderr
    # Two processes may write their lines at once, beside lines of gloo in torch 2.8.
    assert done.stdout.count(str(normplug.BatchNorm2d)) == 2
    assert done.stderr.count("models  model") == 1


def test_a_command_a_module_and_a_chained_sitecustomize(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    (tmp_path / "there.py").write_text("import sys; print(sys.argv, __spec__.name)")
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\nexec {sys.executable} -m there $@")
    tool.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    for words in (["-m", "there"], [tool]):
        done = python(*RUN, *words, "--x", environment={"PYTHONPATH": path})
        expected = ["mine", "mine", f"['{tmp_path}/there.py', '--x'] there"]
        assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["x.py", "--", "-m"],
        ["x.py", "--"],
        ["--", "x.py", "a", "--"],
        ["x.py", "--", "--"],
    ],
)
def test_the_dashes_of_a_program_stay(words, monkeypatch):
    started = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "execv", lambda *call: started.append(call))
    command.main(words)
    ((_, made),) = started
    assert made[-len(words) + words.index("x.py") :] == words[words.index("x.py") :]


@pytest.mark.parametrize("words", [["--mode", "big", "x"], ["--when", "x", "y"], []])
def test_a_wrong_command_line_starts_nothing(words, monkeypatch, capsys):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert "python -m normplug run: error:" in capsys.readouterr().err


def test_without_run_it_takes_no_argument(capsys):
    entry.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m normplug  ")
    with pytest.raises(SystemExit) as ended:
        entry.main(["rum", "x.py"])
    assert str(ended.value).endswith("error: unknown argument 'rum'")


@pytest.mark.parametrize("mode", ["gold", "0", "nan", "1/2"])
def test_a_wrong_mode_is_answered_by_the_rule(mode, capsys):
    with pytest.raises(SystemExit):
        command.main(["--mode", mode, "x.py"])
    message = capsys.readouterr().err
    assert "mode must be 'golden'" in message
    assert "got " in message


def test_a_signal_ends_the_program_itself(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(100)")
    words = [sys.executable, *RUN, str(script)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        start = time.monotonic()
        assert process.wait() == -15
        assert time.monotonic() - start < 50


def test_what_cannot_be_reported_harms_nothing(tmp_path):
    script = tmp_path / "script.py"
    code = "import sys, torch; torch.nn.LayerNorm(2).to('cpu'); print('done')\n"
    script.write_text(code)
    done = python(*RUN, "--report", tmp_path, script)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.startswith("normplug run: the report cannot be written: ")
    assert done.stderr.count("\n") == 1
    script.write_text(code + "sys.stderr = None")
    done = python(*RUN, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


QUANTIZED = """
import torch
from torch import nn
from torch.ao.quantization import fuse_modules, fuse_modules_qat
net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).to("cpu")
print(type(net[1]).__module__)
names = ["0", "1", "2"]
print(type(fuse_modules_qat(net, names)[0]).__name__)
print(type(torch.quantization.fuse_modules(net.eval(), names)[0]).__name__)
"""


def test_a_program_may_fuse_layers_for_quantization(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(QUANTIZED)
    done = python("-W", "ignore", *RUN, script)
    ours = "normplug.modules.batch_norm"
    assert done.stdout.split() == [ours, "ConvBnReLU2d", "ConvReLU2d"], done.stderr


# --- A model, in this process ---


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.last = nn.LayerNorm(4)

    def forward(self, x):
        return self.last(self.act(self.norm(self.conv(x))).mean((2, 3)))


X = torch.randn(5, 3, 6, 6) * 3 + 100


@pytest.fixture
def net():
    return Net()


def runner(**changes):
    return program.Run(Namespace(**{**command.chosen(), "devices": "any", **changes}))


def row_of(run, model):
    return next(row for reference, row in run.rows.items() if reference() is model)


def state(model):
    """Classes and attributes of all modules, by which a model is stock or not."""
    return [(type(m), sorted(vars(m))) for m in model.modules()]


def test_a_model_is_taken_once_and_so_is_a_part_that_is_added_later(net):
    run, expected = runner(), copy.deepcopy(net)(X)
    run.moved(net)
    assert torch.equal(net(X), expected)
    assert row_of(run, net) == ("Net", 2, 2, 1, "none")
    assert not list(net.buffers())[3:]  # no statistics are added
    net.norm = nn.SyncBatchNorm.convert_sync_batchnorm(net.norm)
    run.moved(net)
    assert type(net.norm) is nn.SyncBatchNorm
    run.take(nn.DataParallel(net))
    assert type(net.norm) is normplug.SyncBatchNorm
    assert set(fused_modules(net)) == {""}
    assert len(run.rows) == 1


def test_a_copy_is_swapped_and_fused_and_no_model_of_its_own(net):
    run = runner()
    run.take(net)
    twin = copy.deepcopy(net)
    run.moved(twin)
    assert set(fused_modules(twin)) == {""}
    assert str(run).count("Net") == 1


def test_an_optimizer_shows_the_whole_model_and_cpu_models_wait_for_a_gpu(net):
    outer = nn.ModuleDict({"net": net, "loss": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(net.last.parameters(), 0.1)
    run = runner(devices="cuda")
    run.trained(optimizer)
    assert type(net.norm) is nn.BatchNorm2d
    run.sharded(net.last)
    assert type(net.norm) is normplug.BatchNorm2d
    assert [type(r()) for r in run.rows if r() in (net, outer)] == [nn.ModuleDict]


class Unmade(nn.Module):
    def __init__(self):
        pass


class Unlike(Net):
    parameters = None


def test_modules_without_parameters_to_list_hide_no_model(net):
    others = [Unmade(), Unlike()]
    run = runner()
    run.trained(torch.optim.SGD(net.parameters(), 0.1))
    assert type(net.norm) is normplug.BatchNorm2d
    assert type(others[1].norm) is nn.BatchNorm2d


def test_a_report_without_models_says_where_the_models_are(net):
    run = runner(devices="cuda")
    nothing = "this process moved no model with norms to a GPU, and trained none on one"
    assert str(run) == f"normplug run, mode standard: {nothing}"
    run.moved(net)
    run.trained(torch.optim.SGD(net.parameters(), 0.1))
    where = "On other devices: Net. For a test on the CPU, use --devices any"
    assert str(run) == f"normplug run, mode standard: {nothing}. {where}"
    run = runner()
    run.moved(nn.Linear(2, 2))
    assert str(run).endswith(": this process moved no model with norms, and trained none")


@pytest.mark.parametrize("kind", ["fails", "dry", "check"])
def test_a_model_stays_as_it_was(net, kind, monkeypatch, capsys):
    before = state(net)
    run = runner(mode="golden", dry_run=kind == "dry", check=kind == "check")

    def fail(*_, **__):
        raise ZeroDivisionError("by\nzero")

    if kind != "dry":
        name = {"fails": "fuse", "check": "check"}[kind]
        monkeypatch.setattr(program, name, fail)
    run.take(net)
    run.check(net, (X,), {})
    if kind != "dry":
        run.take(net)  # an error is final
    assert state(net) == before
    said = "" if kind == "dry" else "normplug run: Net is unchanged: by zero\n"
    assert capsys.readouterr().err == said
    assert row_of(run, net).swapped == (2 if kind == "dry" else 0)
    assert len(run.rows) == 1
    assert "pickles" not in str(run)


def test_the_first_batch_is_checked(net, monkeypatch):
    run, batches = runner(check=True), []
    monkeypatch.setattr(program, "check", lambda *call: batches.append(call))
    run.take(net)
    for _ in range(2):
        run.check(torch.compile(net), (X,), {})
    assert batches == [(net, X)]
    folded = Net()
    run.take(folded)
    folded.norm = folded.last = nn.Identity()
    run.check(folded, (X,), {})
    assert len(batches) == 1


def test_a_model_that_its_program_swaps_is_left(net):
    normplug.swap(net.last, "golden")
    before = state(net)
    run = runner()
    run.take(net)
    assert state(net) == before
    assert row_of(run, net).left == "all: the program swaps it itself"
    assert type(pickle.loads(pickle.dumps(net)).last) is LayerNorm


def test_filters_and_other_modes(net):
    run = runner(mode=0.5, include=["last"], fuse=False)
    run.take(net)
    assert not fused_modules(net)
    assert type(net.norm) is nn.BatchNorm2d
    assert net.last.target_variance == 0.5
    assert row_of(run, net).left == "1 BatchNorm2d (not included)"
    assert pickle.loads(pickle.dumps(net)).last.target_variance == 0.5
    assert str(run).endswith("pickle normplug.unswap(model) to need none")


def test_a_checkpoint_is_that_of_the_stock_layers(net):
    stock = net.state_dict()._metadata
    runner().moved(net)
    assert net.state_dict()._metadata == stock
    net.load_state_dict(net.state_dict())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_torchscript_compiles_the_stock_layers(net):
    runner().take(net)
    expected = net(X)
    torch.testing.assert_close(torch.jit.script(net)(X), expected)


def test_autocast_keeps_pytorchs_dtype(net):
    runner().take(net)
    assert net.last.autocast_output == "float32"


def test_the_options_reach_the_program(monkeypatch):
    environment, started = {}, []
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "execv", lambda *call: started.append(call))
    command.main(["--mode", "0.5", "--exclude", "a*", "x.py", "--mode", "golden"])
    assert environment["PYTHONPATH"] == SITE
    options = json.loads(environment["NORMPLUG_RUN"])
    assert (options["mode"], options["exclude"]) == (0.5, ["a*"])
    assert options.keys() == command.chosen().keys()
    ((_, words),) = started
    assert words[-3:] == ["x.py", "--mode", "golden"]
    assert Path(words[0]).name.startswith("python")


ON_A_GPU = """
import torch
from torch import nn
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to("cuda")
optimizer = torch.optim.SGD(net.parameters(), 0.1)
with torch.autocast("cuda", torch.float16):
    net(torch.randn(4, 3, 8, 8, device="cuda")).sum().backward()
optimizer.step()
torch.save(net, "model.pt")
"""


@pytest.mark.gpu
def test_kernels_run_on_a_gpu(tmp_path):
    (tmp_path / "script.py").write_text(ON_A_GPU)
    done = python("-m", "normplug", "run", "--check", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = [line.split() for line in done.stderr.splitlines()]
    assert ["1", "Sequential", "1", "1", "1", "none"] in cells
    assert cells[-1][-2:] == ["in", "kernels"]
    load = "import torch; print(torch.load('model.pt', weights_only=False)[1])"
    loaded = run_code(load, directory=tmp_path, hidden=["normplug"])
    assert loaded.stdout.startswith("BatchNorm2d(8, eps"), loaded.stderr
