"""Parts of a data set that are kept in memory, on the host or on a GPU, and their batches."""

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
    """A part whose samples are stacked in tensors, so that indexing makes a whole batch.

    Attributes:
        held: names of the attributes with these tensors.
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
        """Return the part on `device`: itself if it is there already, else a copy."""
        if self.device == device:
            return self
        moved = copy.copy(self)
        for name in self.held:
            setattr(moved, name, getattr(self, name).to(device))
        return moved

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.held]


class Batches:
    """The batches of a part in memory, in place of a DataLoader; one pass per epoch.

    The sampler draws the order on the host, so the order does not depend on where the part is. It
    is copied to the part's device once per epoch. After that, a batch of a part on a GPU copies
    nothing from the host and never synchronises with it.

    Args:
        part: the samples.
        batches: the indices of each batch; Lightning calls `set_epoch` of its sampler.

    Attributes:
        batch_sampler: the argument `batches`, under the name that it has in a DataLoader.
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
            # From pinned memory, Lightning copies to the GPU asynchronously.
            yield (inputs.pin_memory(), targets.pin_memory()) if pin else (inputs, targets)
