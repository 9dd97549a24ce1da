"""Take the inputs of a linear in another order."""

import torch
from torch import Tensor

_ROWS = 256
"""Rows that are reordered at once: the matrices of wide linears are most of the memory that quantizing takes,
and indexing twice would hold a third one."""


def reordered(matrix: Tensor, order: Tensor) -> Tensor:
    """A matrix [K, K] with its rows and columns in `order` [K]."""
    found = torch.empty_like(matrix)
    for start in range(0, len(order), _ROWS):
        found[start : start + _ROWS] = matrix[order[start : start + _ROWS]][:, order]
    return found
