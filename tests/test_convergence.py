"""Small networks learn with normplug's norms as with torch's: their curves differ by rounding.

Stock runs, in which each value that a norm returns moves by what rounding may change, make a band.
The curve of normplug stays in it, and that of a variance wrong by 3% does not.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normplug
from fuse_cases import Block, Parts, PreNorm, Resnet

BATCH, WIDTH, CLASSES = 32, 32, 10
# Steps: distances are averaged over a window; long runs take a GPU.
WINDOW, LONG = (
    10,
    200,
)
# The relative change of a norm's results between two ways to round: float32 sums in another order,
# and half a unit in the last place of bfloat16.
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-8}
# The band is FACTOR times the largest distance of a stock run so far (two stock runs differ by up
# to 2.5 times), but not narrower than FLOOR times that: TF32 has noise of its own.
FACTOR, FLOOR = 4, 3e-5


class Attention(Parts):
    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            qkv[0], qkv[1], qkv[2], is_causal=self.causal
        )
        return mixed.transpose(1, 2).flatten(2)


class UNet(Parts):
    def forward(self, x):
        fine = self.fine(self.first(x))
        coarse = F.interpolate(self.coarse(self.down(fine)), scale_factor=2.0)
        return self.last(torch.cat((fine, coarse), 1))


def transformer(norm, first, *last):
    blocks = [PreNorm(WIDTH, norm=norm) for _ in range(2)]
    for block in blocks:
        block.mix = Attention(qkv=nn.Linear(WIDTH, 3 * WIDTH), causal=norm is nn.RMSNorm)
        block.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))
    return nn.Sequential(first, *blocks, norm(WIDTH), *last)


def network(name):
    if name == "resnet":
        stem = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        head = nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, CLASSES)
        return nn.Sequential(*stem, Block(16), Block(16), *head)
    if name == "vit":  # a token is a row of pixels
        tokens = nn.Sequential(nn.Flatten(1, 2), nn.Linear(16, WIDTH))
        return transformer(
            nn.LayerNorm, tokens, nn.Flatten(), nn.Linear(48 * WIDTH, CLASSES)
        )
    if name == "llama":
        head = nn.Linear(WIDTH, 64), nn.Flatten(0, 1)
        return transformer(nn.RMSNorm, nn.Embedding(64, WIDTH), *head)
    first, down, last = (
        nn.Conv2d(3, 8, 3, 1, 1),
        nn.Conv2d(8, 8, 2, 2),
        nn.Conv2d(16, 3, 3, 1, 1),
    )
    return UNet(first=first, fine=Resnet(), down=down, coarse=Resnet(), last=last)


def curve(net, name, dtype, steps):
    """The loss of each training step, on noisy pictures of a few kinds or on sequences."""
    device = next(net.parameters()).device.type
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    drawn = {"generator": torch.Generator().manual_seed(1)}
    kinds, losses = torch.randn(CLASSES, 3, 16, 16, **drawn), []
    for _ in range(steps):
        labels = torch.randint(CLASSES, (BATCH,), **drawn)
        x = kinds[labels] + (8 if name == "vit" else 2) * torch.randn(
            BATCH, 3, 16, 16, **drawn
        )
        target = kinds[labels] if name == "unet" else labels
        if name == "llama":  # each sequence counts in steps of its own
            start = torch.randint(64, (BATCH, 1), **drawn)
            tokens = (start + labels[:, None] * torch.arange(17)) % 64
            x, target = tokens[:, :-1], tokens[:, 1:].flatten()
        with nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype):
            y = net(x.to(device)).float()
        loss = (F.mse_loss if name == "unet" else F.cross_entropy)(y, target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["resnet", "vit", "llama", "unet"])
@pytest.mark.parametrize("steps", [2 * WINDOW, pytest.param(LONG, marks=pytest.mark.gpu)])
def test_curves_are_as_close_as_rounding_allows(steps, name, dtype):
    torch.manual_seed(0)
    net = network(name).to("cuda" if steps == LONG else "cpu")
    stock = curve(copy.deepcopy(net), name, dtype, steps)
    assert steps < LONG or stock[-WINDOW:].mean() < 0.9 * stock[0]  # it learns

    def distances(net, steps=steps):
        apart = (curve(net, name, dtype, steps) - stock[:steps]).abs() / stock[:steps]
        return apart.unflatten(0, (-1, WINDOW)).mean(1)

    def round_otherwise(module, inputs, y):
        noise = 2 * torch.rand_like(y, dtype=torch.float32) - 1
        return (y * (1 + noise * ROUNDING[dtype])).to(y)

    others = [copy.deepcopy(net) for _ in range(2)]
    for row in (*normplug.plan(others[0]), *normplug.plan(others[1])):
        row.module.register_forward_hook(round_otherwise)
    largest = torch.stack([*map(distances, others)]).amax(0).cummax(0).values
    band = FACTOR * largest.clamp(min=FLOOR)
    assert (distances(normplug.fuse(normplug.swap(copy.deepcopy(net)))) <= band).all()
    assert (distances(normplug.fuse(normplug.swap(net, 1.03)), WINDOW) > band[:1]).all()
