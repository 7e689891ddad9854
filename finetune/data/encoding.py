"""Convert examples to token ids and to the ranges of tokens that contribute to the loss.

The trained range is exactly the text that the model generates at inference. It starts after the prompt and
ends with the token that ends the turn. finetune never guesses where the assistant's turns are. It uses the
first method that applies:

1. The chat template marks the turns itself (`{% generation %}`).
2. TRL has a marked variant of the template.
3. finetune renders the chat turn by turn, and each text is a prefix of the next.

If no method applies, finetune raises an error.
"""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core.errors import Problem, UserError
from finetune.data import chat_templates, content_check, loss_mask, text_changes
from finetune.data.chat_templates import A_TOOL, KEY, bundled, look_at, marked_twin, other_prompt
from finetune.data.content_check import LOST
from finetune.data.examples import BadRow, Example, short
from finetune.data.messages import REASONING_KEYS, THINKING
from finetune.data.template_sandbox import STOPPED, ChatTemplate, Rendered, render

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

    from finetune.recipe.schema import Data

ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "</s>")
LEFT_OUT = {  # role or key of a message -> its name in errors
    "system": "system messages",
    "tool_calls": "tool calls",
    "tool": "tool results",
    **dict.fromkeys(REASONING_KEYS, "reasoning"),
}
CHATML = "data.chat_template: chatml"
NEEDS_TEMPLATE = "the data has chats, and a template turns them into text"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
RARE = "\ua4d0\U00012000"  # letters of Lisu and cuneiform, whose UTF-8 has no byte in common
ATTEMPTS = 8  # maximum number of attempts to shorten the prompts of an example


class Encoded(NamedTuple):
    """The tokens of one example."""

    ids: list[int]
    trained: list[tuple[int, int]]
    """Ranges [start, end) of tokens that contribute to the loss."""
    merged: bool = False
    """Whether one token holds the end of the prompt and the start of the answer.

    Inference never sees such a token.
    """
    doubled: bool = False
    """Whether the text itself started with a BOS token, so that the tokenizer did not add another one."""
    cut: int = 0
    """Number of tokens removed from the prompts."""
    answer: int = 0
    """Place of the first token of a completion. 0 for texts and chats."""
    left_out: content_check.Part | None = None
    """A part that the chat template omits and may omit: reasoning of an earlier turn, or a speaker's name."""
    weights: tuple[tuple[int, int, float], ...] = ()
    """Ranges [start, end) of trained tokens with a weight between 0 and 1. Other trained tokens have 1."""
    is_divided: bool = False
    """Whether a token has characters of two weights."""

    def labels(self) -> list[int]:
        """Return the token id for each token that contributes to the loss, else -100."""
        return loss_mask.labels(self.ids, self.trained)

    def token_weights(self) -> list[float]:
        """Return the weight of each token's loss. It has no effect on a token without a label."""
        found = [1.0] * len(self.ids)
        for start, end, weight in self.weights:
            found[start:end] = [weight] * (end - start)
        return found


@dataclass(frozen=True)
class Encoder:
    """Convert examples to tokens in the same way for training and evaluation."""

    tokenizer: Any
    train_on: str  # assistant | last_turn | completion | all
    own: str = ""  # the tokenizer's template, used at inference
    template: str = ""  # the template used in training: `own` or its marked variant
    way: str = "none"  # how to find the assistant's turns: marks | turns | none
    prompt_end: str = ""  # text that the template writes before an answer
    after_turn: str = ""  # text that the template writes after the end of the last turn
    leaves_out: frozenset[str] = frozenset()  # parts that the template omits (keys of LEFT_OUT)
    opening: tuple[int, ...] = ()  # tokens that the tokenizer adds before a text without a template
    stops: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    """Notes on the template."""
    unknown: frozenset[int] = frozenset()
    """The ids that the tokenizer gives to all characters that it does not know."""
    special: re.Pattern[str] = re.compile("(?!)")
    """Matches any special token of the tokenizer."""
    comparison: text_changes.Comparison | None = None
    """How each text is compared, if a step of the tokenizer can change or drop words."""
    date: str | None = None
    """The date given to a template that asks for the time."""
    with_tools: Encoder | None = None
    """The encoder for chats with tools, if the tokenizer has a separate template for them."""

    def longest(self, max_length: int) -> int:
        """Return the most tokens that both `data.max_length` and the model's positions allow."""
        return min(max_length, int(self.tokenizer.model_max_length))

    def __call__(self, examples: list[Example]) -> list[Encoded | BadRow]:
        """Encode each example, in order."""
        return self.tokenize(examples, self.render(examples))

    def render(self, examples: list[Example]) -> list[Rendered | None]:
        """Render each chat. Examples that are not chats give `None`."""
        special, found = self.tokenizer.special_tokens_map, dict[int, Rendered]()
        for encoder, chosen in self._by_template(examples):
            chats = [(examples[index].messages, examples[index].tools) for index in chosen]
            template = ChatTemplate(encoder.template, special, encoder.date)
            texts = render(template, chats, encoder.way, after_turn=encoder.after_turn)
            found |= zip(chosen, texts, strict=True)
        return [found.get(index) for index in range(len(examples))]

    def _by_template(self, examples: list[Example]) -> list[tuple[Encoder, list[int]]]:
        """Return each encoder with the indices of the chats that its template renders."""
        of = [self._of(example) if example.messages else None for example in examples]
        found = [
            (encoder, [i for i, its in enumerate(of) if its is encoder])
            for encoder in (self, self.with_tools)
            if encoder
        ]
        return [(encoder, chosen) for encoder, chosen in found if chosen]

    def _of(self, example: Example) -> Encoder:
        return self.with_tools if self.with_tools and example.tools else self

    def tokenize(self, examples: list[Example], rendered: list[Rendered | None]) -> list[Encoded | BadRow]:
        """Tokenize examples whose chats are already rendered."""
        backend = self.tokenizer.backend_tokenizer
        # The template wrote the special tokens of a chat. Adding them again would double the first one.
        head, shared, encodings = self._encode_chats([text for text in rendered if text])
        chats = iter(encodings)
        # Encode a prompt and its completion as one text: some tokenizers start every text with a space.
        texts = [(example.prompt or "") + example.completion for example in examples if not example.messages]
        plain = iter(backend.encode_batch(texts, add_special_tokens=False))
        if self.comparison:
            self._refuse_changes(examples, rendered, self.comparison)
        found: list[Encoded | BadRow] = []
        for example, text, missing in zip(
            examples, rendered, self._find_missing(examples, rendered), strict=True
        ):
            if text is None:
                found.append(self._plain(example, next(plain)))
                continue
            encoding = next(chats)
            try:
                encoded = self._of(example)._chat(example, text, head, shared, encoding)
                left_out = content_check.refuse(example, missing) if missing else None
                self._of(example)._check_marks(example, text)
                found.append(encoded._replace(left_out=left_out) if left_out else encoded)
            except BadRow as bad:
                found.append(bad)
        return found

    def _check_marks(self, example: Example, text: Rendered) -> None:
        """Refuse a chat whose template marks parts of answers, or the contents of others."""
        if self.way == "marks" and self.train_on != "all":
            wrong = content_check.misplaced(example, text.text, text.spans)
            if wrong:
                raise _wrong_marks(wrong, example.where)

    def _refuse_changes(
        self, examples: list[Example], rendered: list[Rendered | None], how: text_changes.Comparison
    ) -> None:
        """Stop if the tokenizer changes or drops words of an example (exit 2)."""
        backend = self.tokenizer.backend_tokenizer
        for example, text in zip(examples, rendered, strict=True):
            whole = text.text if text else (example.prompt or "") + example.completion
            parts = self.special.split(whole)  # special tokens stay as they are
            changes = (text_changes.find(backend, part, how) for part in parts)
            if change := next(filter(None, changes), ""):
                raise UserError(
                    Problem(
                        "the tokenizer changes the text of an example",
                        "model.name",
                        example.where,
                        change,
                        fix="use the tokenizer of another checkpoint",
                        why="the model would be trained on another text",
                        code="tokenizer",
                    )
                )

    def _find_missing(
        self, examples: list[Example], rendered: list[Rendered | None]
    ) -> list[list[content_check.Part]]:
        """Return the parts of each chat that its rendered text lacks.

        The template itself can contain a short part by chance. Chats with such parts are rendered again with
        markers.
        """
        found, doubts = list[list[content_check.Part]](), dict[int, list[content_check.Part]]()
        for index, (example, text) in enumerate(zip(examples, rendered, strict=True)):
            parts = content_check.parts(example) if text and not text.error else []
            missing = content_check.find_missing(parts, text.text) if text else []
            found.append(missing)
            doubtful = content_check.doubtful(parts, text.text) if text else []
            if doubtful := [part for part in doubtful if part not in missing]:
                doubts[index] = doubtful
        marked = [content_check.with_markers(examples[index], doubtful) for index, doubtful in doubts.items()]
        texts = self.render([example for example, _ in marked])
        for (index, doubtful), (_, markers), text in zip(doubts.items(), marked, texts, strict=True):
            if text and not text.error:
                written = set(content_check.MARKER.findall(text.text))
                pairs = zip(doubtful, markers, strict=True)
                found[index] += [part for part, marker in pairs if marker and marker not in written]
        return found

    def _encode_chats(self, chats: list[Rendered]) -> tuple[int, list[int], list[Any]]:
        """Tokenize the common beginning of all chats once, and the rest of each chat.

        The beginning ends before a special token. The tokenizer splits a text at special tokens first, so no
        other token can cross this border. The first chat verifies this.

        Returns:
            The number of characters of the common beginning, its token ids, and the encoding of each rest.
        """
        backend, texts = self.tokenizer.backend_tokenizer, [chat.text for chat in chats]
        ends = [min(texts), max(texts)] if len(texts) > 1 else [""]
        same = os.path.commonprefix(ends)  # noqa: RUF071 (of texts, not of paths)
        first = min((chat.spans[0][0] for chat in chats if chat.spans), default=len(same))
        # All tokens that contribute to the loss are in the rest
        marks = list(self.special.finditer(same[:first]))
        head = marks[-1].start() if marks else 0
        shared = backend.encode(same[:head], add_special_tokens=False).ids
        encodings = backend.encode_batch([text[head:] for text in texts], add_special_tokens=False)
        if head and shared + encodings[0].ids != backend.encode(texts[0], add_special_tokens=False).ids:
            return 0, [], backend.encode_batch(texts, add_special_tokens=False)
        return head, shared, encodings

    def prompts(self, examples: list[Example]) -> list[list[int]]:
        """Return the token ids of each prompt: all text before the answer, with the generation prompt."""
        backend, texts = self.tokenizer.backend_tokenizer, iter(self.prompt_texts(examples))
        found = []
        for example in examples:
            if example.messages:
                found.append(backend.encode(next(texts), add_special_tokens=False).ids)
            else:
                ids = backend.encode(example.prompt or "", add_special_tokens=False).ids
                found.append(self._opened(ids)[0])
        return found

    def prompt_texts(self, examples: list[Example]) -> list[str]:
        """Return the text of each chat before its last answer, including the generation prompt.

        The template that is saved with the tokenizer renders it, as at inference.

        Raises:
            UserError: this template does not accept a chat that the training template may accept (exit 2).
        """
        special, found = self.tokenizer.special_tokens_map, dict[int, str]()
        for encoder, chosen in self._by_template(examples):
            prompts = [((examples[index].messages or [])[:-1], examples[index].tools) for index in chosen]
            texts = render(ChatTemplate(encoder.own, special, encoder.date), prompts, prompt=True)
            for index, text in zip(chosen, texts, strict=True):
                if text.error:
                    raise UserError(
                        Problem(
                            "the chat template can't render a prompt",
                            KEY,
                            examples[index].where,
                            text.error,
                            fix="data.chat_template: chatml",
                            code="chat-template",
                        )
                    )
                found[index] = text.text
        return [found[index] for index in sorted(found)]

    def shortened(self, example: Example, whole: Encoded, limit: int) -> Encoded | None:
        """Cut the beginnings of the longest prompts until the example fits.

        Return `None` if it cannot fit.

        Answers and system messages stay complete.

        Args:
            whole: the encoded example.
            limit: maximum number of tokens.
        """
        if not example.messages:
            return self._cut_plain(whole, limit)
        encoded: Encoded | BadRow = whole
        for attempt in range(ATTEMPTS):
            excess = len(encoded.ids) - limit
            if excess <= 0:
                return encoded._replace(cut=len(whole.ids) - len(encoded.ids))
            # The shorter text can have other tokens, so each attempt cuts more than the one before
            shorter = self._cut_longest(example, excess + 2**attempt - 1)
            if shorter is None:
                return None
            example = shorter
            (encoded,) = self([example])
            if isinstance(encoded, BadRow):
                return None
        return None

    def _cut_longest(self, example: Example, excess: int) -> Example | None:
        """Remove `excess` tokens and at least one character from the longest user or tool message."""
        messages = list(example.messages or ())
        given = [index for index, message in enumerate(messages) if message["role"] in ("user", "tool")]
        contents = [messages[index]["content"] for index in given]
        encodings = self.tokenizer.backend_tokenizer.encode_batch(contents, add_special_tokens=False)
        length, index, encoding = max(
            ((len(encoding.ids), index, encoding) for index, encoding in zip(given, encodings, strict=True)),
            key=lambda candidate: candidate[0],
        )
        if length < 2:
            return None
        # A token has no character of its own if it is a mark before the text, or a part of a character
        first = next((start for start, _ in encoding.offsets[min(excess, length - 1) :] if start), 0)
        if not first:
            return None
        messages[index] = {**messages[index], "content": messages[index]["content"][first:]}
        return replace(example, messages=messages)

    def _cut_plain(self, whole: Encoded, limit: int) -> Encoded | None:
        """Remove the first tokens of a prompt, but keep what the tokenizer adds before every text."""
        excess = len(whole.ids) - limit
        kept = int(whole.ids[0] == self.tokenizer.bos_token_id)
        if whole.ids[: len(self.opening)] == [*self.opening]:
            kept = max(kept, len(self.opening))
        if excess <= 0:
            return whole
        if whole.answer - kept <= excess:
            return None
        ids, answer = whole.ids[:kept] + whole.ids[kept + excess :], whole.answer - excess
        start = 0 if self.train_on == "all" else answer
        return whole._replace(ids=ids, trained=[(start, len(ids))], cut=excess, answer=answer)

    def _plain(self, example: Example, encoding: Any) -> Encoded:
        """Encode a prompt with its completion, or a text, and add the EOS token."""
        ids, doubled = self._opened(encoding.ids)
        start, merged = 0, False
        if example.prompt is not None:
            border = len(example.prompt)
            text = range(border, border + len(example.completion))
            first = next((t for c in text if (t := encoding.char_to_token(c)) is not None), len(encoding))
            start = len(ids) - len(encoding) + first
            merged = first < len(encoding) and encoding.token_to_chars(first)[0] < border
        if ids[-1:] != [self.tokenizer.eos_token_id]:
            ids.append(self.tokenizer.eos_token_id)
        if self.train_on == "all":
            return Encoded(ids, [(0, len(ids))], doubled=doubled, answer=start)
        return Encoded(ids, [(start, len(ids))], merged, doubled, answer=start)

    def _opened(self, ids: list[int]) -> tuple[list[int], bool]:
        """Add the tokenizer's BOS token unless the text already starts with it."""
        opening = list(self.opening)
        brought = bool(opening) and ids[: len(opening)] == opening
        return (ids, True) if brought else (opening + ids, False)

    def _chat(
        self, example: Example, text: Rendered, head: int, shared: list[int], encoding: Encoding
    ) -> Encoded:
        if text.error.startswith(STOPPED):
            raise UserError(
                Problem(
                    "the chat template takes too long",
                    KEY,
                    example.where,
                    text.error,
                    fix="data.chat_template: chatml",
                    code="chat-template",
                )
            )
        if text.error:
            raise BadRow(
                "malformed",
                "the chat template can't render this chat",
                example.where,
                found=text.error,
                code="chat-template",
            )
        if self.leaves_out:
            self._check_left_out(example)
        if example.tools and not any(str(t["function"].get("name")) in text.text for t in example.tools):
            raise BadRow(
                "malformed",
                "the chat template ignores tools",
                example.where,
                fix="chat_template: qwen3, or remove the column `tools`",
                why=LOST,
                code="data-lost",
            )
        rest = encoding.ids
        ids = shared + rest
        if self.train_on == "all":
            if not all(example.trained) or example.weights:
                key = "weight" if example.weights else "train: false"
                raise BadRow(
                    "malformed",
                    f"`{key}` of a message excludes `train_on: all`",
                    example.where,
                    fix="data.train_on: assistant",
                    code="recipe-conflict",
                )
            return Encoded(ids, [(0, len(ids))])
        found, merged, tail = [], False, text.text[head:]
        weights, is_divided = [], False
        messages = example.messages if example.weights else None
        answers = [message["content"] for message in messages or () if message["role"] == "assistant"]
        for turn, (start, end) in loss_mask.trained_spans(
            example, text, self.train_on, self.tokenizer.eos_token
        ):
            span = start - head, end - head
            low, high, straddles = loss_mask.token_range(
                tail, span, encoding, rest, self.prompt_end, self.stops
            )
            merged |= straddles
            if low >= high:
                continue
            if not example.weights:
                found.append((low + len(shared), high + len(shared)))
                continue
            place, of_turn = 0, example.weights[turn]
            if of_turn.spans:
                first, _ = encoding.token_to_chars(low) or (0, 0)
                place = loss_mask.content_start(tail, span, first, answers[turn], example.where)
            weighted = loss_mask.by_weight(tail, encoding, (low, high), place, of_turn)
            found += [(start + len(shared), end + len(shared)) for start, end in weighted.trained]
            weights += [(start + len(shared), end + len(shared), w) for start, end, w in weighted.fractions]
            is_divided |= weighted.is_divided
        return Encoded(ids, found, merged, weights=tuple(weights), is_divided=is_divided)

    def _check_left_out(self, example: Example) -> None:
        for message in example.messages or ():
            for kind in sorted(self.leaves_out.intersection((message["role"], *message))):
                fix = "data.chat_template: qwen3"
                raise BadRow(
                    "malformed",
                    f"the chat template ignores {LEFT_OUT[kind]}",
                    example.where,
                    fix=f"reasoning: cut, or {fix}" if kind in REASONING_KEYS else fix,
                    why=LOST,
                    code="data-lost",
                )


def _wrong_marks(part: content_check.Part, where: str) -> BadRow:
    """Return the error for a part on the wrong side of the template's marks (`content_check.misplaced`)."""
    if part.kind in ("assistant", "call", "argument"):
        what = "the chat template does not mark a whole answer"
        why = "the model would be trained on a part of the answers"
    else:
        what = f"the chat template marks {content_check.NAMES[part.kind]} as an answer"
        why = "the model would be trained to write the turns of others"
    fix = "data.chat_template: chatml, or put whole answers alone between {% generation %} marks"
    return BadRow("malformed", what, where, short(part.text), fix=fix, why=why, code="chat-template")


def encoders(
    tokenizer: PreTrainedTokenizerBase, data: Data, declared: Collection[int]
) -> Callable[[bool], Encoder]:
    """Return a function that calls `make_encoder` at most once for chats, and once for other examples."""
    return cache(lambda chats: make_encoder(tokenizer, data, chats, declared))


def make_encoder(
    tokenizer: PreTrainedTokenizerBase, data: Data, chats: bool, declared: Collection[int] = ()
) -> Encoder:
    """Create the encoder for a tokenizer.

    Args:
        chats: whether the data contains chats. Other examples need no template.
        declared: ids that the model's generation config declares as the end of an answer.

    Raises:
        UserError: the data contains chats, but the template is missing or does not compile (exit 2).
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            Problem(
                "the tokenizer has no tokenizer.json",
                "model.name",
                found=type(tokenizer).__name__,
                fix="AutoTokenizer.from_pretrained(...).save_pretrained(...)",
                why="finetune maps tokens to characters, which needs a fast tokenizer",
                code="tokenizer",
            )
        )
    backend.no_truncation()
    backend.no_padding()
    known: dict[str, Any] = {"opening": _opening(backend), "unknown": _unknown(backend)}
    known["comparison"] = text_changes.comparison(backend)
    # Ignore ids that are no added tokens of this tokenizer: they can be defaults of the config class.
    ends = {token for token in declared if token in tokenizer.added_tokens_decoder}
    known["stops"] = frozenset(stop_ids(tokenizer) | ends)
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    known["special"] = re.compile("|".join(map(re.escape, sorted(special))) or "(?!)")
    if not chats:
        return Encoder(tokenizer, data.train_on, **known)
    if not tokenizer.chat_template:
        raise UserError(
            Problem(
                "the tokenizer has no chat template",
                KEY,
                expected=f"a Jinja file, or one of {', '.join(bundled())}",
                fix=CHATML,
                why=NEEDS_TEMPLATE,
                code="chat-template",
            )
        )
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if named and "default" not in named:
        raise UserError(
            Problem(
                "none of the tokenizer's chat templates is the default",
                KEY,
                found=", ".join(sorted(named)),
                fix="save one of them as template.jinja, and set data.chat_template: template.jinja",
                code="chat-template",
            )
        )
    encoder = _of_template(tokenizer, str(tokenizer.get_chat_template()), data, known, None)
    if "tool_use" not in named:
        return encoder
    with_tools = _of_template(
        tokenizer, named["tool_use"], data, known, [{"type": "function", "function": A_TOOL}]
    )
    notes = tuple(dict.fromkeys([*encoder.notes, *with_tools.notes]))
    return replace(encoder, with_tools=with_tools, notes=notes)


def _of_template(
    tokenizer: Any,
    own: str,
    data: Data,
    known: dict[str, Any],
    tools: list[dict[str, Any]] | None,
) -> Encoder:
    """Return the encoder of the chats that one template renders with these tools."""
    marked = own if MARKS.search(own) else marked_twin(own)
    way = "none" if data.train_on == "all" else "marks" if marked else "turns"
    template, special = marked or own, tokenizer.special_tokens_map
    ends = [re.escape(tokenizer.backend_tokenizer.id_to_token(stop)) for stop in sorted(known["stops"])]
    date = data.template_date
    if chat_templates.reads_clock(own):
        date = date or datetime.date.today().isoformat()
        known = {**known, "date": date}
    seen = look_at(ChatTemplate(template, special, date), re.compile("|".join(ends) or "(?!)"), tools)
    notes = other_prompt(ChatTemplate(own, special, date), ChatTemplate(template, special, date), tools)
    notes += (f"the chat template uses the date {date} (data.template_date)",) * ("date" in known)
    return Encoder(tokenizer, data.train_on, own, template, way, notes=notes, **known, **seen)


def _opening(backend: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the tokenizer adds before every text: its BOS token, or nothing."""
    found = backend.encode("x", add_special_tokens=True)
    return tuple(found.ids[: found.special_tokens_mask.index(0)])


def _unknown(backend: Tokenizer) -> frozenset[int]:
    """Return the ids that two rare characters share, such as that of <unk>. Their bytes are other ids."""
    first, second = (set(backend.encode(one, add_special_tokens=False).ids) for one in RARE)
    return frozenset(token for token in first & second if backend.id_to_token(token) not in ("▁", "Ġ"))


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that end a turn: the EOS token and the usual end-of-turn tokens of the vocabulary."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    ids: set[Any] = {backend.token_to_id(token) for token in ENDS_OF_TURN} if backend else set()
    # gpt-oss ends a turn with <|return|>. <|end|> ends each message of the turn, such as the reasoning.
    if backend and backend.token_to_id("<|return|>") is not None:
        ids.discard(backend.token_to_id("<|end|>"))
    eos: Any = tokenizer.eos_token_id
    return (ids | {eos}) - {None}


def ends_of_answer(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that end an answer in training: the EOS token and the token that the template adds."""
    given: Any = tokenizer.chat_template
    own = given.get("default") if isinstance(given, dict) else given
    turns = [{"role": "user", "content": "qzuser"}, {"role": "assistant", "content": "qzanswer"}]
    texts = render(ChatTemplate(own, tokenizer.special_tokens_map), [(turns, None)]) if own else []
    after = "".join(text.text.rpartition("qzanswer")[2] for text in texts)
    known = {str(tokenizer.convert_ids_to_tokens(stop)): stop for stop in stop_ids(tokenizer)}
    found = re.search("|".join(map(re.escape, known)), after)
    eos: Any = tokenizer.eos_token_id
    return {known[found[0]], eos} if found else {eos}


def without_thinking(text: str) -> str:
    """Return an answer without the reasoning before it, stripped."""
    text = text.strip()
    found = THINKING.match(text)
    return text[found.end() :] if found else text
