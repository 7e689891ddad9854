"""Several documents in one row of a fixed token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of the documents of each row, by best-fit decreasing bin packing.

    The longest document first, each into the row it leaves the least room in. At most 11/9 of the fewest rows
    possible, and 4 more (Johnson, Demers, Ullman, Garey, Graham 1974). Fill measured: benchmarks/README.md.

    Args:
        lengths: tokens of each document, each between 1 and `budget`.
        budget: tokens of a row.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(budget + 1)]  # room left -> rows that have it
    rooms = 0  # the same as bits, so that the smallest room that is enough is one shift away
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
            rows[row].append(index)
        else:
            room, row = budget, len(rows)
            rows.append([index])
        if room > length:
            by_room[room - length].append(row)
            rooms |= 1 << (room - length)
    return rows
