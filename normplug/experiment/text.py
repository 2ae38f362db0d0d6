"""A text, cut into blocks of bytes or characters; by default, Python's standard library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from normplug.experiment.config import Count, Positive, checked
from normplug.experiment.data import Batch, MemoryPart, Source
from normplug.experiment.language import LanguageModel

PARTS = {"train": 0.8, "val": 0.1, "test": 0.1}  # shares of the text, in the order of the text
# Directories of the standard library whose sources are left out.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


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

    @checked
    def __init__(
        self,
        path: str | None = None,
        unit: Literal["byte", "char"] = "byte",
        block_size: Count = 128,
        megabytes: Positive | None = 4.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.unit = unit
        self.block_size = block_size
        limit = None if megabytes is None else round(megabytes * 1e6)
        text = _library(limit) if path is None else self._read(Path(path).expanduser(), limit)
        self.name = "text" if path is None else Path(path).name
        self.tokens, self.vocabulary = self._tokenised(text)
        sizes = [round(share * len(self.tokens)) for share in PARTS.values()]
        if min(sizes) <= block_size:
            raise ValueError(
                f"{self.caller}: each part of the text must be longer than block_size="
                f"{block_size}; the smallest has {min(sizes)} tokens. Use a longer text or a "
                "smaller data.block_size."
            )
        sizes[0] += len(self.tokens) - sum(sizes)
        self._parts = dict(zip(PARTS, self.tokens.split(sizes), strict=True))
        self.sha256 = hashlib.sha256(text).hexdigest()

    def setup(self, stage: str) -> None:
        """Cut the parts into blocks; the target of each token is the next token."""
        size = self.block_size
        self.set_parts(
            *(
                MemoryPart(part[:-1].unfold(0, size, size), part[1:].unfold(0, size, size))
                for part in self._parts.values()
            )
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Widen the tokens, which are stored as bytes, on their device."""
        inputs, targets = batch
        return inputs.long(), targets.long()

    def learner(self, net: nn.Module, optimizer: Any, **options: Any) -> LanguageModel:
        """Return the LightningModule that trains `net` on this text."""
        ratios = {stage: _per_character(self._parts[stage], self.unit) for stage in ("val", "test")}
        return LanguageModel(
            net,
            optimizer,
            unit=self.unit,
            tokens_per_character=ratios,
            unigram_bits=self.unigram_bits,
            **options,
        )

    @property
    def items_per_batch(self) -> int:
        """Tokens in a batch of one device."""
        return self.batch_size * self.block_size

    @property
    def unigram_bits(self) -> float:
        """Unigram entropy of the text, in bits per character."""
        counts = self.tokens.long().bincount().double()
        share = counts[counts > 0] / len(self.tokens)
        return float(-(share * share.log2()).sum()) * _per_character(self.tokens, self.unit)

    def facts(self) -> dict[str, Any]:
        """Identify the text: SHA-256 and number of tokens."""
        return {"text_sha256": self.sha256, "text_tokens": len(self.tokens)}

    def _read(self, path: Path, limit: int | None) -> bytes:
        try:
            with path.open("rb") as file:
                return _cut(file.read(-1 if limit is None else limit + 1), limit)
        except OSError as error:
            raise ValueError(
                f"{self.caller}: path must be a readable file, got {path} "
                f"({error.strerror or error}). Check data.path; a relative path starts at the "
                "working directory."
            ) from None

    def _tokenised(self, text: bytes) -> tuple[Tensor, int]:
        """Return the tokens, and the size of their vocabulary."""
        if self.unit == "byte":
            return torch.from_numpy(np.frombuffer(text, np.uint8).copy()), 256
        try:
            characters = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.caller}: unit=char needs a text in UTF-8; byte {error.start} of "
                f"{len(text)} is not. Use data.unit=byte, or convert the text."
            ) from None
        index = {character: i for i, character in enumerate(sorted(set(characters)))}
        return torch.tensor([index[c] for c in characters], dtype=torch.int32), len(index)


def _library(limit: int | None) -> bytes:
    """Return the sources of Python's standard library, up to `limit` bytes."""
    text = bytearray()
    for path in _sources(Path(sysconfig.get_path("stdlib"))):
        text += path.read_bytes()
        if limit is not None and len(text) > limit:
            break
    return _cut(bytes(text), limit)


def _sources(root: Path) -> Iterator[Path]:
    """Yield the Python files below `root`, in an order that does not depend on the file system."""
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in LEFT_OUT]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    yield from sorted(found, key=lambda path: path.relative_to(root).parts)


def _cut(text: bytes, limit: int | None) -> bytes:
    """Return the first `limit` bytes, less a last UTF-8 character that the limit would split."""
    if limit is None or len(text) <= limit:
        return text
    end = limit
    while end > max(limit - 4, 0) and text[end] & 0xC0 == 0x80:  # a byte that continues a character
        end -= 1
    return text[:end]


def _per_character(tokens: Tensor, unit: str) -> float:
    """Return tokens per character; in UTF-8, the bytes 0b10xxxxxx continue a character."""
    if unit == "char":
        return 1.0
    return len(tokens) / max(int(((tokens & 0xC0) != 0x80).sum()), 1)
