"""A pool of rows: what backward leaves for the experts, until each of them has taken in its own."""

from __future__ import annotations

import torch


class RowPool:
    """As large as it has to be. Row 0 is always zero, so that it can fill up what has too few rows."""

    def __init__(self, num_rows: int, row_size: int, device: torch.device) -> None:
        self._rows = torch.zeros(1 + num_rows, row_size, device=device)
        self._is_taken = bytearray([1]) + bytearray(num_rows)
        self._marks = [0] * (1 + num_rows)

    def take(self, count: int, mark: int) -> int:
        """The first of so many successive rows, with any content; `mark` comes back when one is freed."""
        first = self._is_taken.find(bytes(count))
        while first < 0:
            self._rows = torch.cat([self._rows, torch.zeros_like(self._rows)])
            self._is_taken += bytearray(len(self._is_taken))
            self._marks += [0] * len(self._marks)
            first = self._is_taken.find(bytes(count))
        self._is_taken[first : first + count] = b"\x01" * count
        self._marks[first : first + count] = [mark] * count
        return first

    def span(self, first: int, count: int) -> torch.Tensor:
        """To be written and not kept: `take` may move it."""
        return self._rows[first : first + count]

    def rows(self, numbers: list[int] | list[list[int]]) -> torch.Tensor:
        """A copy of any of them."""
        index = torch.tensor(numbers).to(self._rows.device, non_blocking=True)
        return self._rows.index_select(0, index.view(-1)).view(*index.shape, -1)

    def free(self, row: int) -> int:
        """Frees a row, and gives the mark that it had."""
        self._is_taken[row] = 0
        return self._marks[row]
