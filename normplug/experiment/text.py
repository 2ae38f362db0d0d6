"""A text, cut into blocks of bytes or characters; by default, Python's standard library."""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from normplug.experiment.config import Count, Positive
from normplug.experiment.data import STRICT, Batch, Part, Source
from normplug.experiment.errors import WHO
from normplug.experiment.language import LanguageModel

PARTS = {"train": 0.8, "val": 0.1, "test": 0.1}  # shares of the text, in the order of the text
# Directories of the standard library whose sources are left out.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(eq=False, kw_only=True, config=STRICT)
class Text(Source):
    """A text: the first 80% is for training, the next 10% for validation, the last for the test.

    Args:
        path: a file; None for the sources of Python's standard library, without its tests, one
            after another in the order of their paths.
        unit: what a token is: a "byte", or a "char" of UTF-8. The vocabulary is the 256 bytes, or
            the characters that occur in the text.
        block_size: context length, in tokens.
        megabytes: how much of the text to use, from its start; None for all of it.
        **options: see `Source`.

    Attributes:
        vocabulary: number of tokens.

    Raises:
        ValueError: the text cannot be read, is not UTF-8 for "char", or is too short.
    """

    gives = ("vocabulary", "block_size")
    held_out = "the last tenth of the text for the test, the tenth before it for validation"

    path: str | None = None
    unit: Literal["byte", "char"] = "byte"
    block_size: Count = 128
    megabytes: Positive | None = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = None if self.megabytes is None else round(self.megabytes * 1e6)
        text = _read(self.path, limit)
        self.sha256 = hashlib.sha256(text).hexdigest()
        if self.unit == "byte":
            self.tokens, self.vocabulary = (
                torch.from_numpy(np.frombuffer(text, np.uint8).copy()),
                256,
            )
        else:
            self.tokens, self.vocabulary = _characters(text)
        sizes = [round(share * len(self.tokens)) for share in PARTS.values()]
        if min(sizes) <= self.block_size:
            raise ValueError(
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

    @property
    def items_per_batch(self) -> int:
        """Tokens in a batch of one device."""
        return self.batch_size * self.block_size

    def tokens_per_character(self, part: str | None = None) -> float:
        """Tokens per character of a part, or of the whole text."""
        tokens = self.tokens if part is None else self.parts[part]
        if self.unit == "char":
            return 1.0
        # In UTF-8, the bytes 0b10xxxxxx continue a character.
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
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise ValueError(
            f"{WHO}: path must be a readable file, got {path} ({error.strerror or error}). Check "
            "data.path; a relative path starts at the working directory."
        ) from None


def _characters(text: bytes) -> tuple[Tensor, int]:
    """Return the characters as tokens, without a last one that is cut, and their vocabulary."""
    try:
        characters = codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{WHO}: unit=char needs a text in UTF-8; byte {error.start} of {len(text)} is not. "
            "Use data.unit=byte, or convert the text."
        ) from None
    index = {character: i for i, character in enumerate(sorted(set(characters)))}
    return torch.tensor([index[c] for c in characters], dtype=torch.int32), len(index)
