"""Arrays with a leading batch axis, in which each row selects, reads or writes at an index of its own."""

from collections.abc import Iterable, Iterator
from typing import Protocol, Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def write(buffer: Tensor, values: Tensor, start: Int[Tensor, " batch"]) -> Tensor:
    """A copy of `buffer` [batch, m, ...] with `values` [batch, n, ...] in it, each row's from its own `start` on."""
    row, position = torch.arange(values.shape[0])[:, None], start[:, None] + torch.arange(values.shape[1])
    return buffer.index_put((row, position), values)


def of_branch(x: Tensor, branch: Int[Tensor, " batch"]) -> Tensor:
    """x[b, branch[b]]."""
    return x[torch.arange(x.shape[0], device=x.device), branch.to(x.device)]


class TensorTuple(Protocol):
    """A named tuple of tensors."""

    def __iter__(self) -> Iterator[Tensor]: ...
    @classmethod
    def _make(cls, iterable: Iterable[Tensor], /) -> Self: ...


def where_row[T: TensorTuple](condition: Bool[Tensor, " batch"], new: T, old: T) -> T:
    """Selects whole rows of two tuples of tensors with a leading batch axis."""
    return old._make(torch.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b) for a, b in zip(new, old, strict=True))
