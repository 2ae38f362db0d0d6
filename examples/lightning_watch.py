"""Lightning: swap the norms by a callback, and log the variances at every norm.

    pip install -e ".[lightning]"  # in a clone of the repository
    python examples/lightning_watch.py

A network of residual blocks learns whether two points of a square are close to each other. The
callback `VarianceLogger` measures the variance at each norm, and prints a table at the end. On a
CPU it takes less than a minute.
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from normplug.callbacks import SwapNorms, VarianceLogger

WIDTH = 64
BLOCKS = 6


class Block(nn.Module):
    """A residual block: x + MLP(LayerNorm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's result to its input."""
        return x + self.mlp(self.norm(x))


class Classifier(LightningModule):
    """Residual blocks with a head of two classes."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block() for _ in range(BLOCKS)]
        self.net = nn.Sequential(
            nn.Linear(4, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        points, labels = batch
        return nn.functional.cross_entropy(self.net(points), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log the accuracy."""
        points, labels = batch
        accuracy = (self.net(points).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.002)


def pairs(count: int) -> TensorDataset:
    """Pairs of points, (count, 4), and whether they are closer than 0.5."""
    points = torch.rand(count, 2, 2)
    distance = (points[:, 0] - points[:, 1]).norm(dim=1)
    return TensorDataset(points.flatten(1), (distance < 0.5).long())


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="default: 400")
    parser.add_argument(
        "--out", default="lightning_watch", help="default: lightning_watch"
    )
    a = parser.parse_args()
    seed_everything(0)
    training = DataLoader(pairs(20_000), batch_size=128, shuffle=True)
    validation = DataLoader(pairs(2_000), batch_size=500)

    variances = VarianceLogger(every_n_steps=max(a.steps // 8, 1), dirpath=a.out)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[SwapNorms(fuse=True), variances],
        default_root_dir=a.out,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
        max_steps=a.steps,
    )
    model = Classifier()
    trainer.fit(model, training, validation)

    # The variance of the input grows from block to block: each block adds its result to the sum.
    print(variances.table())
    print(
        f"accuracy {trainer.validate(model, validation, verbose=False)[0]['accuracy']:.1%}"
    )
    print(f"{a.out}/ has variance.csv, and a heat map if matplotlib is installed.")


if __name__ == "__main__":
    main()
