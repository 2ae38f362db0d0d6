"""The experiment's networks, with random weights: from libraries, and a GPT."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import VisionTransformer, get_model

import normplug
from normplug._checks import needs
from normplug._measure import BASELINE
from normplug.experiment.config import Fraction, checked, mode_of
from normplug.experiment.errors import WHO, UserError

PROBED_TOKENS = 16
LEAK = 1e-5  # of the change at the last token; see `is_causal`
SMALL_IMAGE = 64  # pixels; up to here, an ImageNet stem (stride 4) would discard too much


@checked
def resnet(arch: str, *, num_classes: int, image_size: int) -> nn.Module:
    """A ResNet of torchvision, such as "resnet18": images (N, 3, H, W) -> (N, num_classes).

    For images of at most 64 pixels, the stem is a 3x3 convolution of stride 1 without max-pool, as
    in He et al. 2015 (arXiv:1512.03385), section 4.2.
    """
    net = get_model(arch, num_classes=num_classes)
    if image_size <= SMALL_IMAGE:
        conv = nn.Conv2d(3, net.conv1.out_channels, 3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        net.conv1 = conv
        net.maxpool = nn.Identity()
    return net


@checked
def vit(
    *,
    num_classes: int,
    image_size: int,
    patch_size: PositiveInt | None = None,
    hidden_dim: PositiveInt = 64,
    depth: PositiveInt = 4,
    heads: PositiveInt = 4,
    dropout: Fraction = 0.0,
) -> VisionTransformer:
    """A VisionTransformer of torchvision (arXiv:2010.11929): (N, 3, H, W) -> (N, num_classes).

    Unlike `nn.TransformerEncoderLayer`, its blocks call their LayerNorms in eval too. The MLP is
    twice as wide as the residual stream (`hidden_dim`). By default, `patch_size` is the divisor of
    `image_size`, at least 2, that is nearest to an eighth of it.
    """
    if patch_size is None:
        divisors = [d for d in range(2, image_size + 1) if image_size % d == 0]
        patch_size = min(divisors, key=lambda d: abs(d - image_size / 8), default=1)
    net = VisionTransformer(
        image_size=image_size,
        patch_size=patch_size,
        num_layers=depth,
        num_heads=heads,
        hidden_dim=hidden_dim,
        mlp_dim=2 * hidden_dim,
        dropout=dropout,
        attention_dropout=dropout,
        num_classes=num_classes,
    )
    # torchvision initialises the head to zero, so no gradient would pass it in the first step.
    nn.init.trunc_normal_(net.heads.head.weight, std=0.02)
    return net


class Attention(nn.Module):
    """Causal self-attention, with dropout of its weights and of its outputs."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, L, width) -> (N, L, width)."""
        split = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1))
        # Each (N, heads, L, width / heads).
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        out = self.out(mixed.transpose(1, 2).flatten(2))
        return functional.dropout(out, self.dropout, self.training)


class Block(nn.Module):
    """A pre-norm block: attention, then an MLP, each added to the residual stream."""

    def __init__(
        self, width: int, heads: int, dropout: float, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.norm_1 = norm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_2 = norm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    @property
    def writers(self) -> tuple[nn.Module, nn.Module]:
        """The layers that write to the residual stream."""
        return self.attention.out, self.mlp[2]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Make the block the identity in a `with` block, in fused and in compiled models too."""
        written = [p.detach() for writer in self.writers for p in writer.parameters()]
        kept = [(p, p.clone()) for p in written]
        try:
            for p in written:
                p.zero_()
            yield
        finally:
            for p, values in kept:
                p.copy_(values)


class GPT(nn.Module):
    """A plain pre-norm GPT (Radford et al. 2019, GPT-2) for contexts of up to `block_size` tokens.

    The residual stream has `width` values; the MLP is 4 times as wide. With `scaled_init`, the
    layers that write to the residual stream start with a standard deviation of
    0.02 / sqrt(2 * depth) instead of 0.02.
    """

    @checked
    def __init__(
        self,
        *,
        vocabulary: int,
        block_size: int,
        depth: PositiveInt = 4,
        width: PositiveInt = 128,
        heads: PositiveInt = 4,
        dropout: Fraction = 0.0,
        norm: Literal["layer", "rms"] = "layer",
        scaled_init: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"{WHO}: model.heads must divide model.width={width}; got {heads}."
            )
        make_norm = partial({"layer": nn.LayerNorm, "rms": nn.RMSNorm}[norm], eps=1e-5)
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(block_size, width))
        self.dropout = nn.Dropout(dropout)
        blocks = [Block(width, heads, dropout, make_norm) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = make_norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.position, std=0.02)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if scaled_init:
            self._scale_writers(0.02 / math.sqrt(2 * depth))

    def _scale_writers(self, std: float) -> None:
        for block in self.blocks:
            assert isinstance(block, Block)
            for writer in block.writers:
                nn.init.normal_(writer.get_parameter("weight"), std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, L), int64, L <= block_size -> logits (N, L, vocabulary)."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(self.dropout(x))))


def apply_arm(net: nn.Module, cfg: DictConfig, fuses: bool) -> None:
    """Swap, fuse and scale a stock network as the configuration says."""
    if cfg.gamma0 is not None:
        # A factor, or a mode by depth, for the roots of its targets.
        mode = mode_of(cfg.gamma0) if isinstance(cfg.gamma0, str) else cfg.gamma0**2
        filters = {name: cfg.swap.get(name) for name in ("include", "exclude")}
        # Folds each root into the weight.
        normplug.unswap(normplug.swap(net, mode, **filters))
    for head in heads(net):
        head.weight.data *= cfg.factors.head.start
    if cfg.mode != BASELINE:  # after init, so that all arms start with the same weights
        normplug.swap(net, mode_of(cfg.mode), **cfg.swap)
        if fuses:
            normplug.fuse(net, recompute=cfg.recompute)


def heads(net: nn.Module) -> list[nn.Linear]:
    """The last linear layer: the classifier of each of these networks. [] if there is none."""
    return [module for module in net.modules() if isinstance(module, nn.Linear)][-1:]


@checked
def timm_model(
    name: str, *, num_classes: int, image_size: int, options: dict[str, Any] | None = None
) -> nn.Module:
    """An image classifier of timm, such as "convnext_atto": (N, 3, H, W) -> (N, num_classes).

    Smaller images are enlarged to 64 pixels, since most timm models downsample by a factor of 32.
    """
    with needs(f"{WHO}: model=timm", "zoo"):
        import timm

    size = max(image_size, SMALL_IMAGE)
    arguments = {"num_classes": num_classes, "pretrained": False, **(options or {})}
    try:
        net = timm.create_model(name, img_size=size, **arguments)
    except TypeError:  # a network of convolutions takes images of any size
        net = timm.create_model(name, **arguments)
    return (
        net
        if size == image_size
        else nn.Sequential(nn.Upsample(size, mode="bilinear"), net)
    )


@checked
def hf_causal_lm(
    name: str,
    *,
    vocabulary: int,
    block_size: int,
    width: PositiveInt = 128,
    depth: PositiveInt = 4,
    heads: PositiveInt = 4,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """A causal language model of transformers, such as "llama", from its configuration.

    `block_size` is the maximum context length. The MLP is 4 times as wide as the residual stream.
    It is built with `is_decoder=True`, so BERT sees no later tokens.

    Raises:
        UserError: transformers has no causal language model of this name; it has another vocabulary
            or sees later tokens.
    """
    with needs(f"{WHO}: model=hf_causal_lm", "zoo"):
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        )

    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"{WHO}: model.name must be a causal language model of transformers; got {name!r}, "
            "which is unknown or another kind, such as an encoder-decoder. Choose another, such as "
            "gpt2 or llama."
        )
    known = AutoConfig.for_model(name)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "ffn_dim": 4 * width,
        "word_embed_proj_dim": width,
        "num_key_value_heads": heads,
        "decoder_layers": depth,
        "decoder_attention_heads": heads,
        "decoder_ffn_dim": 4 * width,
        "head_dim": width // heads,
        "max_position_embeddings": block_size,
    }
    sizes = {key: value for key, value in sizes.items() if hasattr(known, key)}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    values = {
        **sizes,
        **tokens,
        "use_cache": False,
        "is_decoder": True,
        **(options or {}),
    }
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **values))
    if not is_causal(net, vocabulary, block_size):
        raise UserError(
            f"{WHO}: model.name={name} is not a causal language model in this configuration: its "
            "output for a token depends on later tokens. Choose another, such as gpt2."
        )
    return net


@torch.no_grad()
def is_causal(net: nn.Module, vocabulary: int, block_size: int) -> bool:
    """Whether a change of the last token leaves the logits of all earlier tokens unchanged.

    With random weights, six kinds of BERT changed them by at least 1.7e-4 of the change at the last
    token. Rounding changed them by at most 1.8e-7, in mixture-of-experts models.
    """
    tokens = torch.arange(min(block_size, PROBED_TOKENS))[None] % vocabulary
    others = tokens.clone()
    others[:, -1] = (others[:, -1] + 1) % vocabulary
    trains = net.training
    net.eval()
    with torch.random.fork_rng(devices=[]):
        logits = net(tokens).logits
        changes = (net(others).logits - logits).abs()
    net.train(trains)
    if logits.shape[-1] != vocabulary:
        raise UserError(
            f"{WHO}: the model must have logits for {vocabulary} tokens; got {logits.shape[-1]}. "
            f"Set the key of its configuration for that: +model.options.KEY={vocabulary}."
        )
    # A context of one token has no earlier ones.
    return bool((changes[:, :-1] <= LEAK * changes[:, -1].max()).all())
