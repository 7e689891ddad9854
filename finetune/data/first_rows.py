"""The first rows of a source, as many as can be looked at in a moment."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from finetune.data.examples import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.data.examples import BadRow

CHARACTERS = 4 * 2**20  # of all texts in the rows


@dataclass
class FirstRows:
    """Iterate over the first rows; `rest` says whether there are more."""

    rows: Iterator[Row | BadRow]
    most: int
    was_cut: bool = False
    """Whether a row was not given because of its size."""

    def __iter__(self) -> Iterator[Row | BadRow]:
        total = 0
        for row in islice(self.rows, self.most):
            total += _characters(row.value) if isinstance(row, Row) else 0
            if total > CHARACTERS:
                self.was_cut = True
                return
            yield row

    def are_all(self) -> bool:
        """Whether the source holds no other rows."""
        return not self.was_cut and next(self.rows, None) is None


def _characters(part: object) -> int:
    """Of all texts in a value, and one for each other value."""
    total, todo = 0, [part]
    while todo:
        part = todo.pop()
        total += len(part) if isinstance(part, str) else 1
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return total
