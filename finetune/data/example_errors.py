"""Collect the rows that cannot be used: the problems, how often each occurs, and where it occurs first."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

from finetune.autoconfig import batch_size
from finetune.core.errors import Problem, UserError, raise_if_any
from finetune.data import hints, source_loading
from finetune.data.examples import BadRow
from finetune.data.first_rows import FirstRows
from finetune.data.messages import ROLES
from finetune.data.source_loading import MAX_SHOWN
from finetune.recipe.schema import Data, Expect

FIRST = 200  # rows of each source that can be checked in a moment
MAX_NAMED = 12  # most frequent roles that an error names
MAX_KINDS = 10  # problems that an error shows for each kind


class BadRows:
    """Collect bad rows, and report each distinct problem once, with the first row that has it."""

    def __init__(self) -> None:
        self.first: dict[tuple[str, str], list[BadRow]] = {}  # (kind, problem) -> the first such rows
        self.rows: Counter[tuple[str, str]] = Counter()
        self.roles: Counter[str] = Counter()  # rows with an unknown role
        self.role_places: dict[str, str] = {}
        self.formats: dict[str, dict[str, tuple[int, str]]] = {}
        """Source -> format -> (number of rows, first row). The expected format comes first."""

    def add(self, bad: BadRow, source: str, wanted: str) -> None:
        """Add a bad row of a source whose rows should have the format `wanted`."""
        key = bad.kind, bad.problem.what
        self.rows[key] += 1
        first = self.first.setdefault(key, [])
        if len(first) < MAX_SHOWN:
            first.append(bad)
        self.roles.update(bad.roles)
        for role in bad.roles:
            self.role_places.setdefault(role, bad.problem.where)
        if bad.kind != "unreadable":
            self.of_format(source, wanted, bad.format or wanted, bad.problem.where)

    def of_format(self, source: str, wanted: str, format: str, where: str) -> None:
        """Count a row of a source, bad or not, under its format."""
        formats = self.formats.setdefault(source, {wanted: (0, "")})
        count, first = formats.get(format, (0, ""))
        formats[format] = count + 1, first or row_of(where)

    def count(self, kind: str) -> int:
        """Return the number of rows with a problem of this kind."""
        return sum(rows for (of, _), rows in self.rows.items() if of == kind)

    def problems(self, kind: str) -> list[Problem]:
        """Return the problems of a kind: each row if there are few, else each distinct problem."""
        keys = [key for key in self.first if key[0] == kind]
        few = self.count(kind) <= MAX_SHOWN
        problems: list[Problem] = []
        for key in keys:
            first, count = self.first[key], self.rows[key]
            if first[0].roles:
                problems.append(self._roles(first[0].problem))
            elif first[0].format:
                problems += self._formats()
            elif few or count == 1:
                problems += [bad.problem for bad in first]
            else:
                problems.append(replace(first[0].problem, what=f"{key[1]} (in {count} examples)"))
        return problems[:MAX_KINDS]

    def _roles(self, first: Problem) -> Problem:
        """Return one problem that names all unknown roles."""
        if self.roles.total() == 1:
            return first
        named = [role for role, _ in self.roles.most_common(MAX_NAMED)]
        places = {role: shown([first.where, self.role_places[role]], 2) for role in named}
        found = [
            f"{role} in {self.roles[role]} examples (first {places[role].removeprefix(first.where + ', ')})"
            for role in named
        ]
        found += [f"{len(self.roles) - MAX_NAMED} more"] if len(self.roles) > MAX_NAMED else []
        return Problem(
            f"{len(self.roles)} unknown roles" if len(self.roles) > 1 else "unknown role",
            where=first.where,
            found="; ".join(found),
            expected=" or ".join(ROLES),
            fix=hints.role_map(named),
            code="data-example",
        )

    def _formats(self) -> list[Problem]:
        """Return a problem for each source whose rows have several formats, with counts and first rows."""
        found = []
        for source, formats in self.formats.items():
            if len(formats) == 1:
                continue
            wanted, said = next(iter(formats)), {name: rows for name, rows in formats.items() if rows[0]}
            counts = "; ".join(
                f"{n} examples are {name} (first {where})" for name, (n, where) in said.items()
            )
            _, first = min(said.values())
            what = f"{source} has examples of {len(said)} formats"
            expected = f"one format: {wanted}, as in the first example"
            fix = "write one file for each format, and list the files in data.name"
            if wanted not in said:
                what, expected, fix = (
                    "no example has the format that the recipe sets",
                    wanted,
                    "data.format: auto",
                )
            found.append(Problem(what, "", first, counts, expected, fix, code="data-format"))
        return found


@dataclass
class FirstExamples:
    """The first examples of all sources that one key of the recipe names."""

    key: str
    count: int = 0
    bad: BadRows = field(default_factory=BadRows)
    are_all: bool = True
    """Whether the sources hold no more examples than were read."""

    def problems(self, data: Data) -> list[Problem]:
        """Return the problems of examples that `data.expect` does not allow.

        A limit that is a share applies only if all examples are known.
        """
        is_share_known = self.are_all and data.validation_fraction is None
        return [
            problem
            for kind in dict.fromkeys(kind for kind, _ in self.bad.first)
            if self._exceeds(kind, data.expect, is_share_known)
            for problem in self.bad.problems(kind)
        ]

    def _exceeds(self, kind: str, expect: Expect, is_share_known: bool) -> bool:
        count, is_dropped = self.bad.count(kind), kind == "unanswered"
        limit = expect.dropped if is_dropped else getattr(expect, kind)
        if not limit and not is_dropped:
            return True
        share = limit if self.key == "data.name" else 1.0
        return is_share_known and (count > share * self.count or count == self.count)


def first_rows(data: Data, at_least: int = 0) -> list[str]:
    """Check the first rows of each local source, as far as possible without a tokenizer.

    Args:
        at_least: number of training examples that one step needs. 0 skips this check.

    Returns:
        Notes on the number of checked examples, empty if no source is local.

    Raises:
        UserError: `finetune data` would not accept an example, or a step needs more examples (exit 2).
    """
    formats, problems = dict[str, str](), list[Problem]()
    splits: dict[str, FirstExamples] = {}
    cut: list[str] = []
    for source, key in source_loading.named(data):
        first = splits.setdefault(key, FirstExamples(key))
        if source_loading.files_of(source, key) is None:
            first.are_all = False
            continue
        try:
            rows = FirstRows(iter(source_loading.read(source, key)), FIRST)
            for row in source_loading.examples(rows, data, source.name, formats, {}):
                first.count += 1
                wanted = formats.get(source.name, "")
                if isinstance(row, BadRow):
                    first.bad.add(row, source.name, wanted)
                else:
                    first.bad.of_format(source.name, wanted, wanted, row.where)
            first.are_all &= rows.are_all()
            cut += [source.name] * rows.was_cut
        except UserError as error:
            problems += error.problems
    problems += [problem for first in splits.values() for problem in first.problems(data)]
    most = _most_examples(data, splits["data.name"])
    if most is not None and most < at_least and not problems:
        problems.append(batch_size.too_few(most, at_least))
    raise_if_any(problems)
    count = sum(first.count for first in splits.values())
    said = f"checked the first {FIRST} examples of each source; run `finetune data` to check all"
    if all(first.are_all for first in splits.values()):
        said = f"checked all {count:,} examples without the tokenizer; `finetune data` checks their tokens"
    notes = [f"{name}: checked less than {FIRST} examples, because they are long" for name in cut]
    return [*([said] if count else []), *notes]


def _most_examples(data: Data, first: FirstExamples) -> int | None:
    """Return the largest possible number of training examples, or `None` if it is not known.

    Encoding can skip or pack examples, and a validation set can be drawn from them. `preparation.check_first`
    counts exactly, with the tokenizer.
    """
    weighted = any(source.weight != 1 for source, key in source_loading.named(data) if key == first.key)
    if not first.are_all or weighted or data.too_long == "split":
        return None
    return first.count - first.bad.rows.total()


def row_of(where: str) -> str:
    """Return the position of a row from its own position or the position of a message in it."""
    return where.partition(", message ")[0]


def shown(places: list[str], count: int) -> str:
    """Format positions as `train.jsonl:51, :53 ...`. A file's name appears only before its first row."""
    found, last = [], None
    for place in places:
        match = re.fullmatch(r"(.*?)([:\[]\d+\]?.*|, byte \d+)", place)
        file, row = match.groups() if match else (place, "")
        found.append(row.removeprefix(", ") if match and file == last else place)
        last = file
    return ", ".join(found) + (" ..." if count > len(places) else "")
