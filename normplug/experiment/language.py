"""Language modelling, the prediction of the next token, evaluated by the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normplug.experiment.data import Batch
from normplug.experiment.learner import Learner
from normplug.experiment.measure import Measure
from normplug.experiment.models import GPT, Block

# Test tokens, per process, on which the loss without each block is measured; rounded up to whole
# batches.
DROP_TOKENS = 2**15


class LanguageModel(Learner):
    """Train `net` to predict the next token of a text.

    Bits per character are the loss times tokens per character, over ln 2. So a model of bytes can
    be compared with a model of characters.

    Args:
        net: tokens (N, L), int64 -> logits (N, L, vocabulary).
        optimizer: see `Learner`.
        unit: what a token is, e.g. "byte".
        tokens_per_character: for the parts "val" and "test".
        unigram_bits: unigram entropy of the text in bits per character: the loss of a model that
            knows only how often each token occurs.
        channels_last: must be False, since a text has no such memory format.
        **options: see `Learner`.

    Raises:
        ValueError: `channels_last`; see also `Learner`.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        *,
        unit: str,
        tokens_per_character: Mapping[str, float],
        unigram_bits: float,
        channels_last: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            net, Measure("loss", f"nats/{unit}", "lower", "tokens"), optimizer, **options
        )
        if channels_last:
            raise ValueError(
                "normplug.experiment: channels_last is a memory format of images; a text has none. "
                "Leave channels_last=true out."
            )
        self.tokens_per_character = dict(tokens_per_character)
        self.unigram_bits = unigram_bits
        # Per test batch, summed over its tokens: the loss, then the loss without each block.
        self._dropped: list[Tensor] = []
        self._dropped_tokens = 0

    def on_test_start(self) -> None:
        """Discard the losses of an earlier test."""
        self._dropped, self._dropped_tokens = [], 0

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss; on the first tokens, measure it without each block of a GPT too."""
        super().test_step(batch, batch_idx)
        if isinstance(self.net, GPT) and self._dropped_tokens < DROP_TOKENS:
            self._drop_blocks(self.net, *batch)

    def log_measure(self, stage: str, logits: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Log the bits per character; the measure itself, the loss, is already logged."""
        bits = loss * self._bits_per_nat(stage)
        self.log_mean(f"{stage}/bits_per_character", bits, len(targets), prog_bar=True)

    def describe(self, value: float, stage: str) -> str:
        """Format a loss, with its bits per character."""
        bits = value * self._bits_per_nat(stage)
        return f"{super().describe(value, stage)}, {bits:.3f} bits per character"

    def headlines(self) -> dict[str, str]:
        """Return the losses, and the unigram entropy for comparison."""
        unigram = f"{self.unigram_bits:.3f} bits per character: each token alone, no context"
        return super().headlines() | {"unigram entropy": unigram}

    def result(self) -> dict[str, Any]:
        """Add the bits per character, and the loss on the same tokens without each block."""
        bits = self.score("test") * self._bits_per_nat("test")
        values = super().result() | {
            "test_bits_per_character": bits,
            "unigram_bits_per_character": self.unigram_bits,
        }
        if not self._dropped:
            return values
        whole, *without = (torch.stack(self._dropped).sum(0) / self._dropped_tokens).tolist()
        dropped = {"tokens": self._dropped_tokens, "loss": whole, "loss_without": without}
        return values | {"block_drop": dropped}

    def _drop_blocks(self, net: GPT, tokens: Tensor, targets: Tensor) -> None:
        losses = [self.loss(tokens, targets)]
        for block in net.blocks:
            assert isinstance(block, Block)
            with block.dropped():
                losses.append(self.loss(tokens, targets))
        self._dropped.append(torch.stack(losses).double() * targets.numel())
        self._dropped_tokens += targets.numel()

    def _bits_per_nat(self, stage: str) -> float:
        """Bits per character for each nat per token."""
        return self.tokens_per_character[stage] / math.log(2)
