"""Read only the first rows of a source, so that checking them takes a moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from finetune.data.examples import BadRow, Row

CHARACTERS = 4 * 2**20  # limit of all texts in the rows together
EACH = 4  # characters counted for a value that is no text


@dataclass
class FirstRows:
    """Iterate over the first rows of a source, at most `most`.

    `are_all` tells whether the source has more.
    """

    rows: Iterator[Row | BadRow]
    most: int
    was_cut: bool = False
    """Whether iteration stopped early because the rows are large."""

    def __iter__(self) -> Iterator[Row | BadRow]:
        total = 0
        for row in islice(self.rows, self.most):
            total += _characters(row.value) if isinstance(row, Row) else 0
            if total > CHARACTERS:
                self.was_cut = True
                return
            yield row

    def are_all(self) -> bool:
        """Return whether the source has no other rows."""
        return not self.was_cut and next(self.rows, None) is None


def _characters(part: object) -> int:
    """Return the characters of all texts in a value, plus `EACH` for each other value."""
    total, todo = 0, [part]
    while todo:
        part = todo.pop()
        total += len(part) if isinstance(part, str) else EACH
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return total
