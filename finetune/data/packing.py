"""Pack several documents into one sequence with a fixed token budget."""

from __future__ import annotations

from collections.abc import Sequence


def best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return the indices of the documents in each sequence, by best-fit decreasing bin packing.

    The longest documents come first. Each document goes into the sequence that it fills best. The result
    needs at most 11/9 of the optimal number of sequences, plus 4 (Johnson et al. 1974).
    docs/reference/benchmarks.md reports the measured fill.

    Args:
        lengths: tokens of each document, between 1 and `budget`.
        budget: tokens of a sequence.
    """
    rows: list[list[int]] = []
    # Room left -> indices of the sequences with that room
    by_room: list[list[int]] = [[] for _ in range(budget + 1)]
    # The non-empty entries of `by_room` as bits, so that one shift finds the smallest sufficient room
    rooms = 0
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
