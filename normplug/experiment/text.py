"""A text, cut into blocks of bytes, and the learner that predicts the next byte."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.optim import Optimizer

from normplug.experiment.config import WHO, Count, Positive, UserError
from normplug.experiment.data import STRICT, Batch, Part, Source
from normplug.experiment.learner import Learner
from normplug.experiment.measure import Measure
from normplug.experiment.models import GPT, Block

PARTS = {"train": 0.8, "val": 0.1, "test": 0.1}  # shares of the text, in the order of the text
# Directories of the standard library whose sources are left out.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Test tokens, per process, on which the loss without each block is measured; rounded up to whole
# batches.
DROP_TOKENS = 2**15


@dataclass(eq=False, kw_only=True, config=STRICT)
class Text(Source):
    """A text: the first 80% is for training, the next 10% for validation, the rest for the test.

    Without a `path`, it is the sources of Python's standard library, without its tests, one after
    another in the order of their paths. Its first `megabytes` are used; None for all of it. A token
    is a byte. `block_size` is the context length, in tokens.

    Raises:
        OSError: the text cannot be read.
        UserError: it is too short.
    """

    gives = ("vocabulary", "block_size")
    vocabulary = 256
    held_out = "the last tenth of the text for the test, the tenth before it for validation"

    path: str | None = None
    block_size: Count = 128
    megabytes: Positive | None = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        text = _read(self.path, None if self.megabytes is None else round(self.megabytes * 1e6))
        self.sha256 = hashlib.sha256(text).hexdigest()
        self.tokens = torch.tensor(np.frombuffer(text, np.uint8))
        sizes = [round(share * len(self.tokens)) for share in PARTS.values()]
        if min(sizes) <= self.block_size:
            raise UserError(
                f"{WHO}: each part of the text must be longer than block_size={self.block_size}; "
                f"the smallest has {min(sizes)} tokens. Use a longer text or a smaller "
                "data.block_size."
            )
        sizes[0] += len(self.tokens) - sum(sizes)
        self.parts = dict(zip(PARTS, self.tokens.split(sizes), strict=True))

    def setup(self, stage: str) -> None:
        """Cut the parts into blocks; the target of each token is the next token."""
        size = self.block_size
        self.set_parts(
            *(
                Part(part[:-1].unfold(0, size, size), part[1:].unfold(0, size, size))
                for part in self.parts.values()
            )
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Widen the tokens, which are stored as bytes, on their device."""
        inputs, targets = batch
        return inputs.long(), targets.long()

    def learner(self, net: nn.Module, optimizer: Any, **options: Any) -> LanguageModel:
        """Return the LightningModule that trains `net` on this text."""
        return LanguageModel(net, optimizer, self, **options)

    def tokens_per_character(self, part: str | None = None) -> float:
        """Tokens per character of UTF-8, in a part or in the whole text."""
        tokens = self.tokens if part is None else self.parts[part]
        # The bytes 0b10xxxxxx continue a character.
        return len(tokens) / max(int(((tokens & 0xC0) != 0x80).sum()), 1)

    @property
    def unigram_bits(self) -> float:
        """Unigram entropy of the text, in bits per character."""
        counts = self.tokens.long().bincount().double()
        share = counts[counts > 0] / len(self.tokens)
        return float(-(share * share.log2()).sum()) * self.tokens_per_character()

    def facts(self) -> dict[str, Any]:
        """Identify the text: SHA-256 and number of tokens."""
        return {"text_sha256": self.sha256, "text_tokens": len(self.tokens)}


def _read(path: str | None, limit: int | None) -> bytes:
    """Return the first `limit` bytes of a file, or of Python's standard library."""
    if path is None:
        found: list[Path] = []
        for folder, inner, files in os.walk(sysconfig.get_path("stdlib")):
            inner[:] = [name for name in inner if name not in LEFT_OUT]
            found += [Path(folder, name) for name in files if name.endswith(".py")]
        return b"".join(file.read_bytes() for file in sorted(found))[:limit]
    with Path(path).expanduser().open("rb") as file:
        return file.read(limit)


class LanguageModel(Learner):
    """Train `net`, tokens (N, L), int64 -> logits (N, L, vocabulary), to predict the next token.

    Bits per character are the loss times tokens per character, over ln 2. The unigram entropy is
    the loss of a model that knows only how often each token occurs.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        text: Text,
        **options: Any,
    ) -> None:
        super().__init__(net, Measure("loss", "nats/byte", "lower", "tokens"), optimizer, **options)
        self.unigram_bits = text.unigram_bits
        self.bits_per_nat = {  # bits per character for each nat per token
            stage: text.tokens_per_character(stage) / math.log(2) for stage in ("val", "test")
        }

    def on_test_start(self) -> None:
        """Discard the losses of an earlier test."""
        # Per batch, summed over its tokens: the loss, then the loss without each block.
        self._dropped: list[Tensor] = []
        self._dropped_tokens = 0

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
