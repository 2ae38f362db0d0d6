"""Language modelling, the prediction of the next token, evaluated by the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normplug.experiment.data import Batch
from normplug.experiment.errors import WHO
from normplug.experiment.learner import Learner
from normplug.experiment.measure import Measure
from normplug.experiment.models import GPT, Block

if TYPE_CHECKING:
    from normplug.experiment.text import Text

# Test tokens, per process, on which the loss without each block is measured; rounded up to whole
# batches.
DROP_TOKENS = 2**15


class LanguageModel(Learner):
    """Train `net`, tokens (N, L), int64 -> logits (N, L, vocabulary), to predict the next token.

    Bits per character are the loss times tokens per character, over ln 2. So a model of bytes can
    be compared with a model of characters. Their unigram entropy is the loss of a model that knows
    only how often each token occurs.

    Raises:
        ValueError: `channels_last`, which a text has not; see also `Learner`.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        text: Text,
        *,
        channels_last: bool = False,
        **options: Any,
    ) -> None:
        measure = Measure("loss", f"nats/{text.unit}", "lower", "tokens")
        super().__init__(net, measure, optimizer, **options)
        if channels_last:
            raise ValueError(f"{WHO}: channels_last=true is for images. Leave it out.")
        self.unigram_bits = text.unigram_bits
        self.bits_per_nat = {  # bits per character for each nat per token
            stage: text.tokens_per_character(stage) / math.log(2) for stage in ("val", "test")
        }
        # Per test batch, summed over its tokens: the loss, then the loss without each block.
        self._dropped: list[Tensor] = []
        self._dropped_tokens = 0

    def on_test_start(self) -> None:
        """Discard the losses of an earlier test."""
        self._dropped, self._dropped_tokens = [], 0

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss; on the first tokens, measure it without each block of a GPT too."""
        super().test_step(batch, batch_idx)
        if not isinstance(self.net, GPT) or self._dropped_tokens >= DROP_TOKENS:
            return
        losses = [self.loss(*batch)]
        for block in self.net.blocks:
            assert isinstance(block, Block)
            with block.dropped():
                losses.append(self.loss(*batch))
        tokens = batch[1].numel()
        self._dropped.append(torch.stack(losses).double() * tokens)
        self._dropped_tokens += tokens

    def log_measure(self, stage: str, logits: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Log the bits per character; the measure itself, the loss, is already logged."""
        bits = loss * self.bits_per_nat[stage]
        self.log_mean(f"{stage}/bits_per_character", bits, len(targets), prog_bar=True)

    def describe(self, value: float, stage: str) -> str:
        """Format a loss, with its bits per character."""
        bits = value * self.bits_per_nat[stage]
        return f"{super().describe(value, stage)}, {bits:.3f} bits per character"

    def headlines(self) -> dict[str, str]:
        """Return the losses, and the unigram entropy for comparison."""
        unigram = f"{self.unigram_bits:.3f} bits per character: each token alone, no context"
        return super().headlines() | {"unigram entropy": unigram}

    def result(self) -> dict[str, Any]:
        """Add the bits per character, and the loss on the same tokens without each block."""
        values = super().result() | {
            "test_bits_per_character": self.score("test") * self.bits_per_nat["test"],
            "unigram_bits_per_character": self.unigram_bits,
        }
        if not self._dropped:
            return values
        whole, *without = (torch.stack(self._dropped).sum(0) / self._dropped_tokens).tolist()
        dropped = {"tokens": self._dropped_tokens, "loss": whole, "loss_without": without}
        return values | {"block_drop": dropped}
