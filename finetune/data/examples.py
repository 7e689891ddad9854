"""A row as it was read, the example that is made of it, and one that none can be made of."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from finetune.core.errors import Problem

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    value: dict[str, Any]
    where: str  # file:line, or name[index]


class BadRow(Exception):
    """A row that can't be trained on: what it is counted as, and what to say of it."""

    roles: tuple[str, ...] = ()
    """Roles of its messages that are not known."""
    format: str = ""
    """The one it has, where that is not its source's."""

    def __init__(self, kind: str, what: str, where: str, found: str = "", **texts: str) -> None:
        super().__init__(what)
        self.kind = kind  # unreadable | malformed | role_order | unanswered
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in found)  # else a terminal obeys it
        self.problem = Problem(what, where=where, found=shown, **texts)


@dataclass(frozen=True, slots=True)
class Example:
    """What one row says, whatever it looked like."""

    where: str
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    trained: tuple[bool, ...] = ()
    """For each of the assistant's messages, whether the row lets it carry loss."""
    prompt: str | None = None
    completion: str = ""
    """The answer to `prompt`; without one, a text all of which is trained on."""
    conversations: tuple[int, ...] = field(default=(), compare=False)
    """Hashes of what tells that two examples belong to one conversation: an id, the first turn."""

    @property
    def answer(self) -> str:
        """What the model should say last."""
        return self.messages[-1]["content"] if self.messages else self.completion

    @property
    def asks(self) -> bool:
        """Whether there is something to answer; plain text and an empty prompt ask nothing."""
        return bool(self.messages) or bool(self.prompt)

    def characters(self) -> int:
        """About how long it is."""
        return (
            sum(len(m["content"]) for m in self.messages or ())
            + len(self.prompt or "")
            + len(self.completion)
        )

    def digest(self) -> int:
        """64 bits that tell examples apart by content."""
        said = [f"{turn['role']}\x1f{turn['content']}" for turn in self.messages or ()]
        more = [self.tools, *(turn for turn in self.messages or () if len(turn) > 2)]
        said += [json.dumps(more, sort_keys=True)] if any(more) else []
        content = "\x1e".join([*said, self.prompt or "", self.completion])
        return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest())


def short(value: object) -> str:
    """A value that is found, for a message."""
    return repr(value)[:60] if not isinstance(value, str) else value[:60]
