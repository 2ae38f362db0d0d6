"""A text, cut into blocks of bytes."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic.dataclasses import dataclass

from normplug.experiment.config import WHO, Count, Positive, UserError
from normplug.experiment.data import STRICT, Batch, Part, Source
from normplug.experiment.measure import Measure

# Directories of the standard library whose sources are left out.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


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

    measure = Measure("loss", "nats/byte", "lower", "tokens")
    gives = ("vocabulary", "block_size")
    vocabulary = 256

    path: str | None = None
    block_size: Count = 128
    megabytes: Positive | None = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        text = _read(self.path, None if self.megabytes is None else round(self.megabytes * 1e6))
        self.sha256 = hashlib.sha256(text).hexdigest()
        self.tokens = torch.tensor(np.frombuffer(text, np.uint8))
        tenth = round(0.1 * len(self.tokens))
        if tenth <= self.block_size:
            raise UserError(
                f"{WHO}: each part of the text must be longer than block_size={self.block_size}; "
                f"the smallest has {tenth} tokens. Use a longer text or a smaller data.block_size."
            )
        self.parts = self.tokens.split([len(self.tokens) - 2 * tenth, tenth, tenth])

    def setup(self, stage: str) -> None:
        """Cut the parts into blocks; the target of each token is the next token."""
        size = self.block_size
        self.set_parts(
            *(
                Part(part[:-1].unfold(0, size, size), part[1:].unfold(0, size, size))
                for part in self.parts
            )
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Widen the tokens, which are stored as bytes, on their device."""
        inputs, targets = batch
        return inputs.long(), targets.long()

    def facts(self, score: float) -> dict[str, Any]:
        """Identify the text by SHA-256 and number of tokens, and convert the test's loss.

        Bits per character are the loss times tokens per character of UTF-8, over ln 2.
        """
        test = self.parts[-1]
        # The bytes 0b10xxxxxx continue a character.
        characters = int(((test & 0xC0) != 0x80).sum())
        return {
            "text_sha256": self.sha256,
            "text_tokens": len(self.tokens),
            "test_bits_per_character": score * len(test) / max(characters, 1) / math.log(2),
        }


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
