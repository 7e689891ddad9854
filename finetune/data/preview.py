"""Show the training data token by token, on the terminal and as a self-contained page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.text import Text

from finetune.core import html_pages, safe_files
from finetune.core.formatting import amount
from finetune.core.privacy import find_parts, find_secrets, masked, secrets
from finetune.core.visible_text import visible_lines
from finetune.data.audit import DROPPED
from finetune.data.loss_mask import IGNORED, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from finetune.core.console import Console
    from finetune.data.audit import Report
    from finetune.data.preparation import Prepared

PAGE_ROWS, PAGE_TOKENS = 20, 30_000  # page limits if the user does not ask for a number of sequences
FILL_BARS = 48
# Kinds that skip an example; the other kinds are only notes
LEFT_OUT = ("unreadable", "malformed", "role_order", *DROPPED)
TRAINED, SPECIAL = "【{}】", "‹{}›"  # noqa: RUF001 (used on terminals without color)
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
STYLES = {
    "trained": "green",
    "weighted": "yellow",
    "masked": "dim",
    "special-trained": "bold green underline",
    "special-weighted": "bold yellow underline",
    "special-masked": "dim underline",
}


class Token(NamedTuple):
    """One displayed unit: a token, or several tokens that form one character."""

    text: str
    ids: list[int]
    """Its token ids, or -1 for each token of a secret."""
    trained: int
    """Number of its tokens that contribute to the loss."""
    special: bool
    weight: float
    """Weight of its loss."""

    @property
    def kind(self) -> str:
        """trained | weighted | masked, or the same after `special-`"""
        loss = "trained" if self.weight == 1 else "weighted"
        return ("special-" if self.special else "") + (loss if self.trained else "masked")

    @property
    def title(self) -> str:
        """Return the token ids and the loss information for the page."""
        name = "token" if len(self.ids) == 1 else "tokens"
        part = "" if self.trained in (0, len(self.ids)) else f": {self.trained} of {len(self.ids)}"
        part += "" if self.weight == 1 else f", weight {self.weight:g}"
        loss = f"in the loss{part}" if self.trained else "not in the loss"
        return f"{name} {' '.join('****' if one < 0 else str(one) for one in self.ids)}, {loss}"


class Piece(NamedTuple):
    """Consecutive tokens of one kind and weight."""

    text: str
    kind: str
    tokens: list[Token]

    @property
    def is_masked(self) -> bool:
        return self.kind.endswith("masked")

    @property
    def weight(self) -> str:
        """Return the weight of the loss if it is between 0 and 1, else an empty string."""
        is_between = self.kind.endswith("weighted") and self.tokens
        return f"\N{MULTIPLICATION SIGN}{self.tokens[0].weight:g}" if is_between else ""


@dataclass(frozen=True)
class Document:
    """One document of a sequence, its origin, and the number of tokens removed from its prompts."""

    where: str
    cut: int
    pieces: list[Piece]
    tokens: int
    trained: int


def documents(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[Document]:
    """Return the documents of one sequence of `Prepared.train`, packed or not."""
    found, start = [], 0
    lengths = row.get("seq_lengths") or [len(row["input_ids"])]
    where = row.get("where") or ["streamed"] * len(lengths)
    cuts = row.get("cut") or [0] * len(lengths)
    for length, place, cut in zip(lengths, where, cuts, strict=True):
        part = slice(start, start + length)
        ids, labels = row["input_ids"][part], row["labels"][part]
        weights = row[WEIGHTS][part] if WEIGHTS in row else [1.0] * length
        start += length
        pieces = []
        units = _without_secrets(list(_tokens(tokenizer, ids, labels, weights)))
        for (kind, _), group in groupby(units, key=lambda one: (one.kind, one.trained > 0 and one.weight)):
            tokens = list(group)
            pieces.append(Piece("".join(token.text for token in tokens), kind, tokens))
        found.append(Document(place, cut, pieces, length, _trained(labels)))
    return found


def _tokens(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], labels: list[int], weights: list[float]
) -> Iterator[Token]:
    """Yield each token with its text.

    The text of a token depends on the token before it (a leading space), and one character can span several
    tokens. So the text is what a token adds to the decoded text, once the decoded text ends with a complete
    character.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    special = set(tokenizer.all_special_ids)
    special |= {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    # ids[context:begin] is the last token yielded, and `before` is its text
    context, begin, before = 0, 0, ""
    for end, last in enumerate(ids, start=1):
        text = backend.decode(ids[context:end], skip_special_tokens=False)
        whole = len(text) > len(before) and not text.endswith(INCOMPLETE)
        if whole or last in special or end == len(ids) or ids[end] in special:
            trained = _trained(labels[begin:end])
            yield Token(text[len(before) :], ids[begin:end], trained, last in special, weights[end - 1])
            context, begin = begin, end
            before = backend.decode(ids[context:begin], skip_special_tokens=False)


def _without_secrets(tokens: list[Token]) -> list[Token]:
    """Replace the characters and token ids of secrets. The page and the screen can be shown to others."""
    characters, found, start = list("".join(token.text for token in tokens)), list[Token](), 0
    text, known = "".join(characters), secrets()
    for secret in (*find_secrets(text, known), *find_parts(text, known)):
        characters[secret.start : secret.end] = "*" * (secret.end - secret.start)
    for token in tokens:
        text = "".join(characters[start : start + len(token.text)])
        is_same, start = text == token.text, start + len(token.text)
        found.append(token if is_same else token._replace(text=text, ids=[-1] * len(token.ids)))
    return found


def _trained(labels: list[int]) -> int:
    return sum(label != IGNORED for label in labels)


def visible(text: str) -> str:
    """Replace each character that has no visible form by a symbol. A space starts each later line, so that no
    line of the data looks like a message of finetune."""
    return visible_lines(text).replace("\n", "↵\n ").replace("\t", "⇥\t")


def chosen(prepared: Prepared, count: int) -> list[dict[str, Any]]:
    """Return `count` sequences, spread evenly over the dataset, or the first ones of a stream."""
    if prepared.path is None:
        return list(islice(prepared.train, count))
    rows: Any = prepared.train
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def show(screen: Console, tokenizer: PreTrainedTokenizerBase, prepared: Prepared, count: int) -> None:
    """Print `count` sequences. Brackets mark the tokens on terminals without color."""
    console, rows = screen.console, chosen(prepared, count)
    colored = console.color_system is not None and not console.no_color
    if rows:
        legend = [
            ("in the loss", "trained"),
            ("not in the loss", "masked"),
            ("special token", "special-masked"),
        ]
        if any(WEIGHTS in row for row in rows):
            legend.insert(1, ("in the loss, times its weight", "weighted"))
        named = [_painted([Piece(name, kind, [])], colored) for name, kind in legend]
        line = Text("  ").join([Text(f"\n{_extent(prepared, len(rows))}:"), *named, Text("↵ line break")])
        console.print(line, soft_wrap=True)
    for number, row in enumerate(rows, start=1):
        if "seq_lengths" in row:
            size = f"{len(row['input_ids']):,} tokens, examples: {len(row['seq_lengths'])}"
            console.print(Text(f"\nsequence {number}: {size}", style="bold"), soft_wrap=True)
        for document in documents(tokenizer, row):
            counts = f"{document.tokens:,} tokens, {document.trained:,} in the loss"
            rule = f"── {visible(masked(document.where))}: {counts} ".ljust(console.width, "─")
            console.print(Text(f"\n{rule}", style="cyan"), soft_wrap=True)
            if document.cut:
                console.print(Text(cut(document.cut), style="yellow"), soft_wrap=True)
            text = _painted(document.pieces, colored)
            console.print(text, soft_wrap=True, end="" if text.plain.endswith("\n") else "\n")


def _extent(prepared: Prepared, shown: int) -> str:
    if prepared.path is None:
        return f"the first {shown:,} sequences of the stream"
    rows: Any = prepared.train
    return f"{shown:,} of {len(rows):,} sequences" + (", spread evenly" if shown < len(rows) else "")


def _painted(pieces: list[Piece], colored: bool) -> Text:
    """Return pieces in color. Without color, brackets mark trained tokens and special tokens.

    A weight between 0 and 1 stands after its tokens.
    """
    if colored:
        runs = [list(run) for _, run in groupby(pieces, key=lambda piece: piece.weight)]
        weights = [(run[-1].weight, STYLES["weighted"]) for run in runs]
        texts = [[(visible(piece.text), STYLES[piece.kind]) for piece in run] for run in runs]
        return Text.assemble(*chain.from_iterable((*run, w) for run, w in zip(texts, weights, strict=True)))
    line = ""
    for (is_masked, weight), run in groupby(pieces, key=lambda piece: (piece.is_masked, piece.weight)):
        texts = ((visible(piece.text), piece.kind.startswith("special")) for piece in run)
        shown = "".join(SPECIAL.format(text) if special else text for text, special in texts)
        line += shown if is_masked else TRAINED.format(shown) + weight
    return Text(line)


def cut(tokens: int) -> str:
    """Return the note on a prompt without its beginning."""
    return f"... finetune removed {tokens:,} token{'s' * (tokens > 1)} of the prompt"


def summary(screen: Console, prepared: Prepared) -> None:
    """Print the audit as a table, and one line for each note."""
    screen.table("data", ("name", "value", "details"), facts(prepared))
    remarked = remarks(prepared.report)
    screen.say("", *(f"{'skipped' if is_skipped else 'note'}: {said}" for is_skipped, said in remarked))
    if not remarked:
        screen.say("fine: finetune trains on every example without a change")


def remarks(reports: dict[str, Report]) -> list[tuple[bool, str]]:
    """Return each note and whether it is about skipped examples. Skipped examples come first."""
    found = [
        (kind in LEFT_OUT, remark if split == "train" else f"validation set: {remark}")
        for split, report in reports.items()
        for kind, remark in report.noted()
    ]
    return sorted(found, key=lambda remark: not remark[0])


def facts(prepared: Prepared) -> list[tuple[str, str, str]]:
    """Return the rows of the audit table (label, value, details), with a row on the preparation."""
    report, found = prepared.report["train"], described(prepared.report)
    if prepared.path is None:
        seen = f"the first {report.seen:,}" if report.seen else "all"
        return [*found, ("prepared", "during training", f"audited {seen} examples")]
    when = "earlier (cached), in" if prepared.cached else "now, in"
    return [*found, ("prepared", f"{when} {amount(report.seconds)} s", str(prepared.path))]


def described(reports: dict[str, Report]) -> list[tuple[str, str, str]]:
    """Return the rows of the audit table: label, value and details."""
    report, held_out = reports["train"], reports["validation"]
    by = ", ".join(f"{who} {tokens:,}" for who, tokens in report.trained_by.items())
    found = [
        ("examples", f"{report.kept:,} of {report.rows:,}", f"{report.dropped:,} skipped"),
        ("tokens", f"{report.tokens:,}", ""),
        ("tokens in the loss", f"{report.trained_tokens:,} ({share(report)})", by),
    ]
    if report.loss_weight:
        found.append(("sum of loss weights", amount(report.loss_weight), "divides the loss of all tokens"))
    if report.lengths:
        named = zip(("1%", "25%", "50%", "75%", "99%"), report.lengths["percentiles"], strict=True)
        low, *_, high = report.lengths["edges"]
        histogram = f"{low:,.0f} {_histogram(report.lengths['counts'])} {high:,.0f}"
        found.append(("lengths", histogram, ", ".join(f"{name} {value:,.0f}" for name, value in named)))
    if report.cut_tokens:
        found.append(("shortened", f"{report.cut_tokens:,} tokens of prompts removed", ""))
    if packed := report.packing:
        rows = f"{packed['rows']:,.0f} sequences of {packed['budget']:,.0f} tokens"
        found.append(("packing", rows, f"{packed['fill']:.1%} full"))
    for name, part, source in mix(report):
        rows = f"{source['rows']:,} examples, weight {source['weight']:g}"
        found.append(("source", name, f"{part:.1%} of the tokens: {rows}"))
    found += [("format", name, source) for source, name in report.formats.items()]
    more = f"{held_out.tokens:,} tokens, {held_out.trained_tokens:,} in the loss ({share(held_out)})"
    more = more if held_out.rows else "no validation set"
    return [*found, ("validation set", f"{held_out.kept:,} of {held_out.rows:,} examples", more)]


def mix(report: Report) -> list[tuple[str, float, dict[str, float]]]:
    """Return each source, its share of the used tokens and its counts.

    The list is empty for a single source.
    """
    used = {  # a report of format 1 does not have the number
        name: source.get("used_tokens", source["tokens"] * source["weight"])
        for name, source in report.mix.items()
    }
    total = sum(used.values()) or 1
    return [(name, used[name] / total, report.mix[name]) for name in used] if len(used) > 1 else []


def share(report: Report) -> str:
    """Return the share of tokens that contribute to the loss, in percent."""
    return f"{report.trained_tokens / max(1, report.tokens):.1%}"


def _histogram(counts: list[float]) -> str:
    return "".join("\N{NO-BREAK SPACE}▁▂▃▄▅▆▇█"[math.ceil(8 * count / max(counts))] for count in counts)


def write_html(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    prepared: Prepared,
    recipe_name: str,
    max_length: int,
    count: int | None = None,
) -> None:
    """Write a self-contained page with the audit, the reasons for skipped examples, and some sequences.

    Args:
        max_length: maximum number of tokens of a sequence.
        count: number of sequences to show. `None` means PAGE_ROWS, or fewer if they are long.
    """
    report = prepared.report["train"]
    if count is None:
        packed = report.packing.get("budget", 0) * report.packing.get("fill", 0)
        count = min(PAGE_ROWS, math.ceil(PAGE_TOKENS / (packed or report.tokens / max(1, report.kept) or 1)))
    rows = [documents(tokenizer, row) for row in chosen(prepared, count)]
    page = html_pages.templates(Path(__file__).parent)
    page.filters |= {"visible": visible, "cut": cut, "share": share}
    text = page.get_template("preview.html.jinja").render(
        title=Path(recipe_name).stem,
        recipe=recipe_name,
        max_length=max_length,
        report=report,
        facts=facts(prepared),
        remarks=remarks(prepared.report),
        mix=mix(report),
        fills=_fills(prepared),
        rows=rows,
        extent=_extent(prepared, len(rows)),
        weighted=any(piece.weight for row in rows for document in row for piece in document.pieces),
    )
    safe_files.write_text(path.parent, path.name, masked(text))


def _fills(prepared: Prepared) -> list[float]:
    """Return the fill of packed sequences in percent, as even quantiles from the fullest to the emptiest."""
    packing = prepared.report["train"].packing
    if not packing:
        return []
    import pyarrow.compute

    rows: Any = prepared.train
    lengths: Any = pyarrow.compute.call_function("list_value_length", [rows.data.column("input_ids")])
    places = np.linspace(1, 0, min(FILL_BARS, len(lengths)))
    return (100 * np.quantile(lengths.to_numpy(), places) / packing["budget"]).tolist()
