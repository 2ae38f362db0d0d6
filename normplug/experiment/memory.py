"""Parts of a data set that are in memory, on the host or on a GPU, and their batches."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset
from typing_extensions import Self

Batch: TypeAlias = tuple[Tensor, Tensor]


class MemoryPart(Dataset[Batch], ABC):
    """A part whose samples are tensors. A whole batch is a few operations where they are.

    Attributes:
        held: the attributes that are these tensors.
    """

    held: ClassVar[tuple[str, ...]]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, rows: Tensor) -> Batch:
        """Return the inputs and the targets at `rows`, int64, on the device of the tensors."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._tensors()[0].device

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def to(self, device: torch.device) -> Self:
        """Return the part on `device`: itself if it is there, else a copy."""
        if self.device == device:
            return self
        moved = copy.copy(self)
        for name in self.held:
            setattr(moved, name, getattr(self, name).to(device))
        return moved

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.held]


class Batches:
    """The batches of a part in memory, one pass an epoch; what a DataLoader is to other parts.

    The sampler draws the order on the host, so that it is the same wherever the part is. The order
    goes to the part's device once an epoch. A batch of a part on a GPU then copies nothing from the
    host, and never makes it wait.

    Args:
        part: where the batches come from.
        batches: what a batch is of; Lightning calls `set_epoch` of its sampler.

    Attributes:
        batch_sampler: the argument `batches`, by the name that a DataLoader has for it.
    """

    def __init__(self, part: MemoryPart, batches: BatchSampler) -> None:
        self.part = part
        self.batch_sampler = batches

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.tensor(list(self.batch_sampler.sampler), device=self.part.device)
        pin = torch.cuda.is_available() and not order.is_cuda
        for rows in order.split(self.batch_sampler.batch_size)[: len(self)]:
            inputs, targets = self.part.batch(rows)
            # From pinned memory Lightning copies to the GPU without waiting.
            yield (inputs.pin_memory(), targets.pin_memory()) if pin else (inputs, targets)
