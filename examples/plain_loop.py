"""A plain training loop: ask `doctor`, swap and fuse, train, ask again, and publish.

    pip install -e .  # in a clone of the repository
    python examples/plain_loop.py

It trains a small convolutional network on images of stripes, which the script makes itself. Which
of four directions do the stripes have? On a CPU it takes less than a minute.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import normplug

CLASSES = 4
SIZE = 16  # pixels
BATCH = 64


def stripes(count: int) -> tuple[Tensor, Tensor]:
    """Noisy images of stripes, (count, 1, SIZE, SIZE), and the class of their direction."""
    labels = torch.randint(CLASSES, (count,))
    angles = (labels * math.pi / CLASSES)[:, None, None]
    phases = 2 * math.pi * torch.rand(count, 1, 1)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    waves = torch.sin(x * angles.cos() + y * angles.sin() + phases)
    images = waves + torch.randn(count, SIZE, SIZE)
    return images[:, None], labels


def network() -> nn.Module:
    """Three convolutions, each with BatchNorm and ReLU, and a linear layer."""
    layers: list[nn.Module] = []
    channels = 1
    for width in (16, 32, 32):
        layers.append(nn.Conv2d(channels, width, 3, padding=1, bias=False))
        layers.append(nn.BatchNorm2d(width))
        layers.append(nn.ReLU())
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images whose class the model finds."""
    model.eval()
    with torch.no_grad():
        found = model(images).argmax(1)
    return (found == labels).float().mean().item()


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="default: 100")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    images, labels = stripes(4096)
    test_images, test_labels = stripes(1024)
    model = network()

    # 1. What is wrong with the norms? Here, the optimizer decays their weights.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    print("Before training, doctor says:")
    print(normplug.doctor(model, images[:BATCH], optimizer=optimizer))

    # 2. Take the fix, and make the norms faster on a GPU. The model computes the same.
    normplug.swap(model)
    normplug.fuse(model)
    groups = normplug.param_groups(model, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    print(f"\n{normplug.plan(model).summary()}")
    print(normplug.fusions(model).summary())

    # 3. Train as always.
    model.train()
    for step in range(steps):
        chosen = torch.randint(len(images), (BATCH,))
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"accuracy {accuracy(model, test_images, test_labels):.1%}")

    # 4. Ask again, with batches of the training data.
    batches = [images[start : start + BATCH] for start in range(0, 10 * BATCH, BATCH)]
    print("\nAfter training, doctor says:")
    print(normplug.doctor(model, batches, optimizer=optimizer))

    # 5. Back to a stock model, which needs no normplug where it is loaded.
    normplug.unswap(model)
    print(f"stock again: accuracy {accuracy(model, test_images, test_labels):.1%}")


if __name__ == "__main__":
    main()
