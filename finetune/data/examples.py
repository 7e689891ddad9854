"""A row of a file, the example made from it, and the error for a row that cannot be used."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from finetune.core.errors import Problem

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    value: dict[str, Any]
    where: str  # file:line, name[index], or file.tar!member


def file_of(where: str) -> str:
    """Return the file or the Hub dataset of the place of a row."""
    return re.sub(r"(\.tar(?:\.\w+)?)!.*$|:\d+$|\[\d+\]$", r"\1", where)


class BadRow(Exception):
    """A row that cannot be trained on, with the kind under which it is counted and its problem."""

    roles: tuple[str, ...] = ()
    """Unknown roles of its messages."""
    format: str = ""
    """The format of the row, if it differs from the format of its source."""

    def __init__(self, kind: str, what: str, where: str, found: str = "", **texts: str) -> None:
        super().__init__(what)
        self.kind = kind  # unreadable | malformed | role_order | unanswered
        # A terminal would interpret control characters
        self.problem = Problem(
            what,
            where=where,
            found="".join(c if c.isprintable() else ascii(c)[1:-1] for c in found),
            **{"code": "data-example", **texts},
        )


class TurnWeights(NamedTuple):
    """The weights of the loss of one assistant message."""

    message: float
    """Weight of the message and of its end-of-turn token."""
    spans: tuple[tuple[int, int, float], ...] = ()
    """Ranges [start, end) of characters of the content, each with its own weight."""


@dataclass(frozen=True, slots=True)
class Example:
    """The content of one row, independent of the row's format."""

    where: str
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    trained: tuple[bool, ...] = ()
    """For each assistant message, whether the row allows training on it."""
    weights: tuple[TurnWeights, ...] = ()
    """For each assistant message, its weights. Empty if all weights are 0 or 1, and of whole messages."""
    prompt: str | None = None
    completion: str = ""
    """The answer to `prompt`. Without a prompt, a text that is trained on completely."""
    conversations: tuple[int, ...] = field(default=(), compare=False)
    """Hashes of the row's ids and first turn. Two examples with a common hash belong to one conversation."""

    @property
    def answer(self) -> str:
        """The last answer, which the model should generate."""
        return self.messages[-1]["content"] if self.messages else self.completion

    @property
    def asks(self) -> bool:
        """Whether the example has a prompt. A plain text and an empty prompt have none."""
        return bool(self.messages) or bool(self.prompt)

    def as_json(self) -> dict[str, Any]:
        """Return the fields, without weights if the example has none."""
        fields = asdict(self)
        return fields if self.weights else {name: fields[name] for name in fields if name != "weights"}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Example:
        """Restore an example from the result of `as_json`."""
        weights = (
            TurnWeights(message, tuple((start, end, weight) for start, end, weight in spans))
            for message, spans in fields.get("weights", ())
        )
        return cls(**{**fields, "trained": tuple(fields["trained"]), "weights": tuple(weights)})

    def characters(self) -> int:
        """Return the approximate length of the example."""
        return (
            sum(len(m["content"]) for m in self.messages or ())
            + len(self.prompt or "")
            + len(self.completion)
        )

    def digest(self) -> int:
        """Return a 64-bit hash of the content."""
        said = [f"{turn['role']}\x1f{turn['content']}" for turn in self.messages or ()]
        more = [self.tools, *(turn for turn in self.messages or () if len(turn) > 2)]
        said += [json.dumps(more, sort_keys=True)] if any(more) else []
        content = "\x1e".join([*said, self.prompt or "", self.completion])
        return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest())


def short(value: object) -> str:
    """Return a shortened form of a value for an error."""
    return repr(value)[:60] if not isinstance(value, str) else value[:60]
