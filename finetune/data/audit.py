"""Record the outcome of every example, and check it against `data.expect` before the model is loaded."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from finetune.core.errors import Problem, UserError, raise_if_any
from finetune.core.formatting import WARNING
from finetune.data.encoding import Encoded, Encoder
from finetune.data.example_errors import BadRows, row_of, shown
from finetune.data.examples import BadRow, Example, short
from finetune.data.source_loading import MAX_SHOWN
from finetune.recipe.schema import Data, Expect

BINS = 24
SAID = {  # kind of outcome -> its text after "N of M examples"
    "unreadable": "can't be read",
    "malformed": "are malformed",
    "role_order": "have roles in the wrong order",
    "unanswered": "have no answer at the end",
    "too_long": "are longer than data.max_length",
    "nothing_trained": "have no token to train on",
    "duplicates": "repeat an earlier example",
    "in_validation": "of the validation set are also in the training data",
    "same_conversation": "share a conversation with a validation example (an id or the first turn)",
    "no_end_of_turn": "don't end with the end of a turn",
    "shortened": "have a shortened prompt (too_long: truncate_prompt)",
    "doubled_bos": "have a second BOS token, which finetune removes",
    "merged": "have a token that belongs to the prompt and to the answer",
    "unknown_text": "have characters that the tokenizer does not know",
    "special_in_content": "have special tokens in the content of a message",
    "reasoning": "have reasoning",
    "reasoning_left_out": "have reasoning in earlier turns, which the chat template ignores",
    "weighted": "have weights of the loss between 0 and 1",
    "divided_token": "have a token in two parts with different weights (its first character decides)",
    "name_left_out": "have a speaker's `name`, which the chat template ignores",
}
BAD = ("unreadable", "malformed", "role_order")
DROPPED = ("too_long", "nothing_trained", "unanswered")


@dataclass
class Report:
    """Outcome of the examples of one split, stored in the run folder's `data_report.json`."""

    sources: dict[str, str] = field(default_factory=dict)
    """File: sha256 of its content. Hub dataset: requested revision."""
    formats: dict[str, str] = field(default_factory=dict)
    """Source: format of its examples."""
    unused: dict[str, dict[str, int]] = field(default_factory=dict)
    """Source: unused column: number of examples with a value in it."""
    read: dict[str, int] = field(default_factory=dict)
    """Source: number of its examples, used or not."""
    passed_by: dict[str, list[str]] = field(default_factory=dict)
    """Folder: entries in it that finetune does not read."""
    folders: list[str] = field(default_factory=list)
    """Notes on data files that finetune does not read, such as the files of other splits."""
    notes: list[str] = field(default_factory=list)
    """Notes on the chat template and the cache."""
    rows: int = 0
    """Number of examples."""
    kept: int = 0
    """Number of examples that are not dropped."""
    tokens: int = 0
    """Tokens of the kept examples."""
    trained_tokens: int = 0
    """Tokens that contribute to the loss. The first token of a document never does."""
    loss_weight: float = 0.0
    """Sum of the weights of the loss, if a token has a weight between 0 and 1, else 0."""
    trained_by: dict[str, int] = field(default_factory=dict)
    """Role: its tokens that contribute to the loss."""
    longest: int = 0
    """Tokens of the longest example, kept or not."""
    lengths: dict[str, list[float]] = field(default_factory=dict)
    """Lengths of the kept documents: `counts` and `edges` of a histogram, and `percentiles`."""
    cut_tokens: int = 0
    """Tokens that finetune removed from long prompts."""
    counts: dict[str, int] = field(default_factory=dict)
    """Kind of outcome, such as `too_long`: number of examples."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """Kind of outcome: places of its first examples."""
    reasons: dict[str, list[str]] = field(default_factory=dict)
    """Kind of outcome: the first distinct problems."""
    mix: dict[str, dict[str, float]] = field(default_factory=dict)
    """Source: examples, tokens and weight."""
    packing: dict[str, float] = field(default_factory=dict)
    """Sequences after packing, the token budget, and the share of the budget that is filled."""
    positions: int = 0
    """The model's maximum positions, if they dropped examples that `data.max_length` would have kept."""
    longest_prompt: int = 0
    """Tokens of the longest prompt that an evaluation generates from."""
    seen: int = 0
    """Number of examples that this report covers if the data is streamed, else 0."""
    seconds: float = 0.0
    """Time to prepare the data."""
    token_ids: str = ""
    """Hash of the token ids, of the trained ranges and of weights below 1, in the order of the data."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def dropped(self) -> int:
        return self.rows - self.kept

    def said(self) -> dict[str, str]:
        """Return the text of each kind. It names the model's maximum positions if they are the limit."""
        return (
            {**SAID, "too_long": f"are longer than the model's {self.positions} positions"}
            if self.positions
            else SAID
        )

    def nothing_kept(self, which: str) -> str:
        """Return a warning if no example of the first ones is trained on; else the empty string."""
        if self.kept or not self.rows:
            return ""
        what = f"none of the first {self.rows} {which} examples has a token to train on"
        return f"{WARNING}{what}; finetune data says whether any example has one"

    def noted(self) -> list[tuple[str, str]]:
        """Return each kind of outcome that occurred, with a line of text about it."""
        of = f"of {self.rows} examples"
        why = {kind: f": {'; '.join(reasons)}" for kind, reasons in self.reasons.items()}
        said = self.said()
        found = [
            (kind, f"{n} {of} {said[kind]} ({shown(self.places[kind], n)}){why.get(kind, '')}")
            for kind, n in self.counts.items()
        ]
        for name, columns in self.unused.items():
            if columns:
                of_all = self.read.get(name, 0)
                said = [
                    column if count == of_all else f"{column} (in {count} of {of_all} examples)"
                    for column, count in sorted(columns.items())
                ]
                found.append(("unused", f"finetune ignores these columns of {name}: {', '.join(said)}"))
        for folder, names in self.passed_by.items():
            more = f" ... ({len(names)})" if len(names) > MAX_SHOWN else ""
            found.append(("passed_by", f"finetune ignores {', '.join(names[:MAX_SHOWN])}{more} in {folder}"))
        found += [("folders", note) for note in self.folders]
        return [*found, *(("template", note) for note in self.notes)]

    def remarks(self) -> list[str]:
        """Return one line of text for each kind of outcome that occurred."""
        return [said for _, said in self.noted()]


def new_token_hash() -> hashlib.blake2b:
    """Return an empty hash for `add_tokens`."""
    return hashlib.blake2b(digest_size=8)


def add_tokens(found: hashlib.blake2b, document: Encoded) -> None:
    """Add a document's token ids, its trained ranges and its weights below 1 to a hash."""
    found.update(array("i", [*document.ids, -1, *chain.from_iterable(document.trained), -1]))
    found.update(array("d", chain.from_iterable(document.weights)))


class Audit:
    """Count examples as they are read, then compare the counts with the limits of the recipe."""

    def __init__(self, encoder_for: Callable[[bool], Encoder], train_on: str, vocabulary: int | None) -> None:
        self.report = Report()
        self.encoder_for, self.train_on, self.vocabulary = encoder_for, train_on, vocabulary
        self.bad_rows = BadRows()
        self.trained_by: Counter[str] = Counter()
        self.lengths, self.digests = array("i"), array("Q")  # one entry for each document
        self.firsts = array("B")  # 1 if a document is the first of its example, else 0
        self.conversations, self.members = (
            array("Q"),
            array("q"),
        )  # conversation hashes, and the index of the document that each hash belongs to
        self.beyond: list[str] = []
        self.reduced = 0.0  # by how much weights reduce the sum of the weights of the loss
        self.token_ids = new_token_hash()

    def count(self, kind: str, where: str) -> None:
        self.report.counts[kind] = self.report.counts.get(kind, 0) + 1
        places = self.report.places.setdefault(kind, [])
        if len(places) < MAX_SHOWN:
            places.append(where)

    def bad(self, bad: BadRow, source: str) -> None:
        """Count an example that cannot be used."""
        self.report.rows += 1
        self.count(bad.kind, row_of(bad.problem.where))
        self.bad_rows.add(bad, source, self.report.formats.get(source, ""))
        reasons = self.report.reasons.setdefault(bad.kind, [])
        if bad.problem.what not in reasons and len(reasons) < MAX_SHOWN:
            reasons.append(bad.problem.what)

    def left_out(self, kind: str, where: str, length: int) -> None:
        """Count an example that is skipped because it is too long or has no token to train on."""
        self.report.rows += 1
        self.report.longest = max(self.report.longest, length)
        self.count(kind, where)

    def limited_to(self, limit: int, max_length: int) -> None:
        """Note that the model's positions limited a skipped example, if they are below `data.max_length`."""
        if limit < max_length:
            self.report.positions = limit

    def keep(self, example: Example, documents: list[Encoded]) -> None:
        """Count an example that is trained on. A plain text can become several documents."""
        report, where = self.report, example.where
        report.rows += 1
        report.kept += 1
        digest = example.digest()
        self.conversations.extend(example.conversations)
        self.members.extend([len(self.lengths)] * len(example.conversations))
        for number, document in enumerate(documents):
            ids, trained = document.ids, sum(end - max(start, 1) for start, end in document.trained)
            add_tokens(self.token_ids, document)
            report.tokens += len(ids)
            report.trained_tokens += trained
            self.reduced += sum(
                (end - max(start, 1)) * (1 - weight) for start, end, weight in document.weights
            )
            self.trained_by[_speaker(example, self.train_on)] += trained
            self.lengths.append(len(ids))
            self.digests.append((digest + number) % 2**64)
            self.firsts.append(number == 0)
            self.look_at_ids(ids, where)
        last = documents[-1]
        report.longest = max(report.longest, sum(len(document.ids) for document in documents) + last.cut)
        report.cut_tokens += last.cut
        encoder = self.encoder_for(bool(example.messages))
        if last.ids[last.trained[-1][1] - 1] not in encoder.stops and self.train_on != "all":
            self.count("no_end_of_turn", where)
        properties = {
            "shortened": last.cut,
            "merged": last.merged,
            "unknown_text": any(not encoder.unknown.isdisjoint(document.ids) for document in documents),
            "weighted": last.weights,
            "divided_token": last.is_divided,
            "doubled_bos": documents[0].doubled,
        }
        for kind, has_it in properties.items():
            if has_it:
                self.count(kind, where)
        if part := documents[0].left_out:
            self.count(f"{part.kind}_left_out", where)
            report.reasons.setdefault(f"{part.kind}_left_out", [short(part.text)])
        self._look_into(example, encoder)

    def look_at_ids(self, ids: list[int], where: str) -> None:
        """Note the position of a token id that is outside the model's embedding."""
        highest = max(ids, default=0)
        if self.vocabulary and highest >= self.vocabulary and len(self.beyond) < MAX_SHOWN:
            self.beyond.append(f"{where} (id {highest})")

    def check_ids(self) -> None:
        """Raise a UserError for token ids that are outside the model's embedding (exit 2)."""
        raise_if_any(self._beyond())

    def _look_into(self, example: Example, encoder: Encoder) -> None:
        """Count special tokens written in the content, and reasoning."""
        turns = example.messages or ()
        said = "\0".join([turn["content"] for turn in turns]) or f"{example.prompt}\0{example.completion}"
        if encoder.special.search(said):
            self.count("special_in_content", example.where)
        if "<think>" in said or any("reasoning_content" in turn for turn in turns):
            self.count("reasoning", example.where)

    def finish(self, places: Callable[[int], str], held_out: Audit | None = None) -> Report:
        """Complete the report with the values that need all examples, such as lengths and duplicates.

        Args:
            places: maps the index of a kept document to its file:line.
            held_out: the audit of the validation examples.
        """
        report, lengths = self.report, np.frombuffer(self.lengths, dtype=np.int32)

        def show(kind: str, rows: np.ndarray, count: int) -> None:
            if len(rows):
                report.counts[kind] = count
                report.places[kind] = [places(int(index)) for index in rows[:MAX_SHOWN]]

        if len(lengths):
            counts, edges = np.histogram(lengths, bins=BINS)
            percentiles = np.percentile(lengths, [1, 25, 50, 75, 99])
            report.lengths = {"counts": counts.tolist(), "edges": edges.tolist()}
            report.lengths["percentiles"] = percentiles.tolist()
        rows, digests = self.of_rows()
        again = np.setdiff1d(rows, rows[np.unique(digests, return_index=True)[1]])
        show("duplicates", again, len(again))
        if held_out:
            _, other = held_out.of_rows()
            both = rows[np.isin(digests, other, kind="sort")]
            show("in_validation", both, int(np.isin(other, digests, kind="sort").sum()))
            ours, theirs = (np.frombuffer(one.conversations, np.uint64) for one in (self, held_out))
            shared = np.unique(np.frombuffer(self.members, np.int64)[np.isin(ours, theirs)])
            shared = np.setdiff1d(shared, both)
            show("same_conversation", shared, len(shared))
        report.trained_by = dict(self.trained_by)
        report.loss_weight = report.trained_tokens - self.reduced if self.reduced else 0.0
        report.token_ids = self.token_ids.hexdigest()
        if self.trained_by.keys() & {"assistant", "every role"}:
            report.notes = list(self.encoder_for(True).notes)
        return report

    def of_rows(self) -> tuple[Any, Any]:
        """Return the index of the first document of each example, and the digest of each example."""
        rows = np.flatnonzero(np.frombuffer(self.firsts, dtype=np.uint8))
        return rows, np.frombuffer(self.digests, dtype=np.uint64)[rows]

    def check(self, data: Data, held_out: int) -> None:
        """Check every limit of `data.expect`.

        Raises:
            UserError: a limit is exceeded. The error names the first examples of each kind (exit 2).
        """
        report, expect = self.report, data.expect
        problems = self._beyond()
        for kind in BAD:
            problems += self._over(kind, (kind,), report.rows, expect)
        if report.kept:
            if data.too_long == "error" and report.counts.get("too_long"):
                problems.append(self._too_long(data))
            else:
                problems += self._over("dropped", DROPPED, report.rows, expect)
            problems += self._over("duplicates", ("duplicates",), report.kept, expect)
            problems += self._over("in_validation", ("in_validation",), held_out, expect)
            problems += self._over("no_end_of_turn", ("no_end_of_turn",), report.kept, expect)
        problems += self._nothing_left("data.name", bool(problems))
        raise_if_any(problems)

    def check_held_out(self, data: Data) -> None:
        """Check that the validation examples can be used for evaluation (exit 2)."""
        self.check_rows(data)
        if self.report.rows and not self.report.kept:
            key = "data.validation" if data.validation else "data.name"
            raise UserError(*self._nothing_left(key, False, "validation examples"))

    def check_rows(self, data: Data) -> None:
        """Raise a UserError for examples of a kind that has no tolerance in `data.expect` (exit 2).

        A streamed dataset can only check these kinds, because its total is not known.
        """
        bad = [p for kind in BAD if not getattr(data.expect, kind) for p in self.bad_rows.problems(kind)]
        bad += self._beyond()
        if data.too_long == "error" and "too_long" in self.report.counts:
            bad.append(self._too_long(data))
        raise_if_any(bad)

    def _over(self, limit: str, kinds: tuple[str, ...], of: int, expect: Expect) -> list[Problem]:
        """Return the problems if the examples of these kinds exceed the limit, one by one if they are few."""
        counts = {kind: n for kind in kinds if (n := self.report.counts.get(kind, 0))}
        total, allowed = sum(counts.values()), getattr(expect, limit)
        if total <= allowed * of:
            return []
        problems = {kind: self.bad_rows.problems(kind) for kind in counts}
        details = [problem for kind in problems for problem in problems[kind]]
        if all(problems.values()) and total <= MAX_SHOWN:
            return details
        said = "; ".join(
            f"{n} {self.report.said()[kind]} ({shown(self.report.places[kind], n)})"
            for kind, n in counts.items()
        )
        fix = self._remedies().get(next(iter(counts)), "correct these examples")
        fix += f", or set data.expect.{limit}: {_enough(total, of):g}" if self.report.kept else ""
        why = WHY.get(limit, "the run would skip these examples")
        return [
            *details,
            Problem(
                f"{total} of {of} examples ({total / of:.1%}) exceed this limit",
                f"data.expect.{limit}",
                found=said,
                expected=f"at most {allowed:.1%}",
                fix=fix,
                why=why if self.report.kept else "no example is left without them",
                code="data-expect",
            ),
        ]

    def _beyond(self) -> list[Problem]:
        if not self.beyond:
            return []
        return [
            Problem(
                "the tokenizer gives token ids that the model does not have",
                "model.name",
                found=", ".join(self.beyond),
                expected=f"a token id < {self.vocabulary}",
                fix="use the tokenizer of this model",
                why="the embedding has no row for these ids",
                code="token-limit",
            )
        ]

    def _nothing_left(self, key: str, said: bool, which: str = "examples") -> list[Problem]:
        """Return the problem that no example is trained on, with each reason.

        Args:
            key: the recipe key that names the source.
            said: whether the problems of bad examples are already reported.
            which: the name of the examples in the message.
        """
        report = self.report
        causes = [kind for kind in (*BAD, *DROPPED) if kind in report.counts and not (said and kind in BAD)]
        if report.kept or (said and not causes):
            return []
        key = "data.max_length" if causes == ["too_long"] else key
        found = ", ".join(f"{n} {report.said()[kind]}" for kind, n in report.counts.items())
        remedies = self._remedies()
        fix = "; ".join(remedies[kind] for kind in causes if kind in remedies)
        details = [problem for kind in causes for problem in self.bad_rows.problems(kind)]
        what = f"none of the {report.rows} {which} has a token to train on"
        if causes == ["unanswered"]:
            what = f"none of the {report.rows} {which} has an answer to train on"
        return [*details, Problem(what, key, found=found, fix=fix, code="data-empty")]

    def _remedies(self) -> dict[str, str]:
        """Return the advice for each kind of outcome.

        If the model's positions are the limit, raising `data.max_length` does not help.
        """
        longest, cut = self.report.longest, REMEDIES["too_long"]
        longer = f"{cut}, or use a model with {longest} positions"
        return {
            **REMEDIES,
            "too_long": longer if self.report.positions else f"data.max_length: {longest}, or {cut}",
        }

    def _too_long(self, data: Data) -> Problem:
        report = self.report
        count, places = report.counts["too_long"], report.places["too_long"]
        limit = (
            f"the model's {report.positions} positions" if report.positions else f"{data.max_length} tokens"
        )
        fix = "" if report.positions else f"max_length: {report.longest}, or too_long: drop"
        return Problem(
            f"{count} example{'s are' if count != 1 else ' is'} too long",
            "data.max_length",
            found=f"{shown(places, count)}; the longest has {report.longest} tokens",
            expected=f"at most {limit}",
            fix=fix or "too_long: drop",
            code="token-limit",
        )


WHY = {  # limit of data.expect -> why a larger share stops the run
    "duplicates": "the model would see these examples several times in an epoch",
    "in_validation": "the validation scores would be too good",
    "no_end_of_turn": "the model would not learn to end its answers",
}
REMEDIES = {
    "too_long": "data.too_long: truncate_prompt (for plain text: split)",
    "unanswered": "end each chat with the assistant's answer",
    "nothing_trained": "train on an answer: check data.train_on, and `train` and `weight` of the messages",
    "duplicates": "remove the repeated examples",
    "in_validation": "remove these examples from one of the two sets",
    "no_end_of_turn": "use a chat_template whose turns end with a special token of this tokenizer",
}


def _speaker(example: Example, train_on: str) -> str:
    if not example.messages:
        return "text" if example.prompt is None else "every token" if train_on == "all" else "completion"
    return "every role" if train_on == "all" else "assistant"


def _enough(count: int, of: int) -> float:
    """Return the smallest limit, rounded up to three decimals, that allows `count` of `of` examples."""
    share = count / max(1, of)
    return min(1.0, np.ceil(share * 1000) / 1000)
