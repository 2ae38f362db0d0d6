"""Steps over several processes: what the bench of synchronised norms writes."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from torch import nn

from forks import forked
from normplug.bench import sync
from normplug.bench.__main__ import main
from normplug.bench.nets import MODELS, Images


class TinyNet(nn.Sequential):
    """5 classes of images of 6x6 pixels."""

    def __init__(self):
        stem = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        super().__init__(*stem, nn.Flatten(), nn.Linear(4 * 6**2, 5))


def process(rank, directory):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ["TEST_PORT"], "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    sys.modules.setdefault("torchvision", sys)  # it is only asked whether it is there
    sync.native.build = Path(directory, f"built by {rank}").touch
    sync.native.status = lambda: "C++"
    MODELS[sync.MODEL] = Images(TinyNet, (4,), image_size=6, classes=5)
    small = ["--batch", "3", "--batch", "2", "--size", "6"]
    short = ["--warm-ups", "1", "--rounds", "2", "--turn", "1"]
    main(["sync", *small, *short, "--out", f"{directory}/rows.json"])


BOTH = """
import sys, torch
from test_bench_sync import process

torch.multiprocessing.start_processes(process, (sys.argv[0],), nprocs=2, start_method="fork")
"""


def test_each_arm_and_batch_has_a_row(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = {"TEST_PORT": str(server.getsockname()[1])}
    done = forked(BOTH, tmp_path, environment=port)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "rows.json").read_text())
    assert {"device", "versions", "date", "settings"} <= content.keys()
    assert content["settings"]["processes"] == 2
    assert content["native"] == "C++"
    assert [file.name for file in tmp_path.glob("built by *")] == ["built by 0"]
    arms = ["local", "normplug", "normplug+fuse"]  # torch's needs CUDA
    assert [(row["batch"], row["arm"]) for row in content["rows"]] == [
        (batch, arm) for batch in (3, 2) for arm in arms
    ]
    assert all(0 < row["ms"] <= row["median_ms"] for row in content["rows"])


def test_one_process_is_told_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="in several processes; got one. Start it with python -m"):
        sync.run((2,), 6, 1, 1, 1, None)
