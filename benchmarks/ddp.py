"""Train a ResNet-18 on CIFAR-10 on one GPU and on several, without and with CUDA graphs.

    python benchmarks/ddp.py data.root=cifar10-jpeg --json ddp.json
    python benchmarks/ddp.py --gpus 1 data.batch_size=1024 --json ddp.json
    python benchmarks/ddp.py --json ddp.json --plot ddp.png

The first arguments are options of train.py, such as where the images are. Every run is a command of
its own, and adds its row when it ends. A GPU takes 512 images per step, so the batch grows with the
GPUs. The learning rate is 0.4 for every batch, as in the configuration. So two GPUs should reach
the accuracy of one GPU with the same batch: the second command.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure
from omegaconf import OmegaConf

from normplug._pictures import WIDTH, colours_of, origin_text, save, styled, title_text
from normplug.bench.rows import Row, add_to_file, read_file

TRAIN = Path(__file__).parents[1] / "train.py"
RECIPE = (
    "experiment=cifar10_resnet18", "data=image_folder", "data.image_size=32", "data.device=cuda",
    "callbacks=minimal", "mode=standard", "trainer.max_epochs=10",
)  # fmt: skip
ARMS = {
    False: "normplug",
    True: "normplug, CUDA graphs",
}  # by `graph`, as pictures name them
RESULTS = ("images_per_s", "step_ms", "test_accuracy", "learning_rate", "epochs")


def run(gpus: int, graph: bool, seed: int, options: Sequence[str]) -> Row:
    """Train once, and return the row. If the run fails, the row has its `error`."""
    several = ["trainer=ddp_sync"] if gpus > 1 else []
    chosen = [f"trainer.devices={gpus}", f"graph={graph}", f"seed={seed}"]
    facts: Row = {"model": "resnet18-cifar", "gpus": gpus, "graph": graph, "seed": seed}
    with TemporaryDirectory() as directory:
        words = [*RECIPE, *several, *options, *chosen, f"hydra.run.dir={directory}"]
        done = subprocess.run(
            [sys.executable, TRAIN, *words], capture_output=True, text=True
        )
        file = Path(directory, "result.json")
        result = json.loads(file.read_text()) if file.exists() else {}
        config = OmegaConf.load(file.with_name("config.yaml")) if file.exists() else None
    if done.returncode != 0:
        text = (done.stdout + done.stderr).strip()
        print(text, file=sys.stderr)
        return facts | {"error": str(result.get("error") or text.splitlines()[-1])}
    facts["batch"] = gpus * config.data.batch_size
    where = {
        "date": result["date"],
        "commit": result["commit"],
        "device": result["hardware"],
    }
    return facts | {key: result[key] for key in RESULTS} | where | result["versions"]


@styled
def draw(rows: Sequence[Row]) -> Figure:
    """Draw the images per second over the GPUs: each run, and the medians with their values."""
    import pandas

    done = pandas.DataFrame([row for row in rows if "error" not in row])
    done = done[done.batch == 512 * done.gpus]
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    axes = figure.add_subplot()
    title = "ResNet-18 on CIFAR-10, 512 images for each GPU and step"
    note = "dots: runs; lines: medians; dotted: in proportion to the GPUs"
    origin = origin_text(done.to_dict("records"))
    figure.suptitle(title_text(f"{title}\n{note}\n{origin}"))
    colours = colours_of(ARMS.values())
    for graph, runs in done.groupby("graph"):
        name = ARMS[graph]
        look = {"color": colours[name]}
        axes.plot(runs.gpus, runs.images_per_s, "o", markersize=3, alpha=0.6, **look)
        middle = runs.groupby("gpus").images_per_s.median()
        axes.plot(middle.index, middle, "o-", label=name, **look)
        for gpus, value in middle.items():
            last = gpus == middle.index[-1]
            axes.annotate(
                f"{value:,.0f}",
                (gpus, value),
                xytext=(8, 0),
                textcoords="offset points",
                va="center" if last else "top",  # below the line that goes on from here
            )
        ideal = middle.iloc[0] / middle.index[0] * middle.index.to_numpy()
        axes.plot(middle.index, ideal, ":", **look)
    axes.set_xticks(sorted(set(done.gpus)))
    axes.margins(x=0.12)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("images per second, higher is better")
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=len(ARMS))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("options", nargs="*", help="of train.py")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--graphs", choices=("no", "yes"), nargs="+", default=["no", "yes"]
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", required=True, help="append to it"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the rows, and run nothing"
    )
    a = parser.parse_intermixed_args(argv)
    if a.plot:
        save(draw(read_file(a.json)), a.plot)
        return
    for seed, gpus, graphs in product(a.seeds, a.gpus, a.graphs):
        row = run(gpus, graphs == "yes", seed, a.options)
        add_to_file(a.json, [row])
        shown = ("gpus", "graph", "seed", "images_per_s", "test_accuracy", "error")
        print({key: row[key] for key in shown if key in row}, flush=True)


if __name__ == "__main__":
    main()
