"""`finetune data`: what it shows is what is trained on, on the terminal and on the page."""

import json
import re
import shlex
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from finetune.cli import main
from finetune.core.console import Console
from finetune.data import preview
from finetune.data.audit import Report
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe.loader import load as load_recipe
from finetune.recipe.schema import Model
from finetune.training import load_data
from support.paths import MODEL, QUICKSTART

ANSWERS = ["Maria did.", "A tag:\n\tif a < b: print('[red]no[/red]')", "👩‍👩‍👧 and 中文, said 😀.", "Omar."]
QUESTIONS = [
    "Who came?",
    "What is <script>alert(1)</script> in [bold]markup[/bold]?",
    "Emoji 😀?",
    "Who left?",
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Model(name=str(MODEL)))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    write(path, zip(QUESTIONS, ANSWERS, strict=True))
    return path


@pytest.fixture
def data(chats: Path, tmp_path: Path) -> Callable[..., int]:
    """`data(*arguments)`: the command on the chats, without held-out rows -> its exit code."""

    def run(*arguments: str) -> int:
        given = [f"data.name={chats}", "data.validation=null", f"data.cache_dir={tmp_path / 'cache'}"]
        return main.main(["data", str(QUICKSTART), *given, *arguments])

    return run


def write(path: Path, chats) -> None:
    rows = ([{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in chats)
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def shown_as_trained(text: str) -> list[str]:
    """What stands in the brackets of a row, its signs taken back."""
    found = [part.partition("】")[0] for part in text.split("【")[1:]]
    return [unsigned(part) for part in found if part != "in the loss"]  # which is the legend's


def unsigned(text: str) -> str:
    text = re.sub("⇥[ \t]+", "\t", text.replace("↵\n ", "\n"))  # rich prints a tab as spaces
    text = text.replace("\\u200d", "\u200d")  # a token of its own on the page: it is visible
    return re.sub(preview.SPECIAL.format("(.*?)"), r"\1", text)


class Page(HTMLParser):
    """Text by kind of token, what is hovered over, and what a page would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loss: list[str] = []
        self.titles: list[str] = []
        self.text, self.loaded = "", []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs) -> None:
        given = dict(attrs)
        self.loaded += [given[name] for name in ("src", "href") if name in given] + [tag] * (tag == "script")
        if tag in ("span", "i"):
            self.open.append(given.get("class", ""))
        if tag == "i":
            self.titles.append(given["title"])
            if "trained" in self.open[-2]:
                self.loss.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("span", "i"):
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if len(self.open) == 2 and "trained" in self.open[0]:
            self.loss[-1] += data


def test_a_row_shows_exactly_what_is_trained_on(data, capsys, chats) -> None:
    assert data("--show", "4") == 0
    shown = capsys.readouterr().out
    assert shown_as_trained(shown) == [f"{answer}<|im_end|>" for answer in ANSWERS]
    for question, number in zip(QUESTIONS, range(1, 5), strict=True):
        assert question in shown and f"── {chats}:{number}: " in shown
    start, end = map(preview.SPECIAL.format, ("<|im_start|>", "<|im_end|>"))
    assert f"{start}user↵\n Who came?{end}↵\n " in shown
    assert "4 of 4 sequences" in shown and "fine: finetune trains on every example" in shown


def test_packed_rows_are_shown_document_by_document(data, capsys, chats) -> None:
    assert data("--show", "1", "data.packing=true", "data.max_length=512") == 0
    shown = capsys.readouterr().out
    assert sorted(shown_as_trained(shown)) == sorted(f"{answer}<|im_end|>" for answer in ANSWERS)
    assert "examples: 4" in shown and f"── {chats}:3: " in shown
    assert "1 sequences of 512 tokens" in shown


def test_fewer_rows_are_spread_over_all(data, capsys, chats) -> None:
    assert data("--show", "2") == 0
    shown = capsys.readouterr().out
    assert f"{chats}:1: " in shown and f"{chats}:3: " in shown and f"{chats}:2: " not in shown
    assert "2 of 4 sequences, spread evenly" in shown
    assert data("--show", "0") == 0
    assert "【" not in capsys.readouterr().out


def test_a_cut_prompt_is_said_where_it_was_cut(data, capsys, chats) -> None:
    write(chats, [("word " * 100 + "end?", "yes"), ("short?", "no")])
    assert data("data.too_long=truncate_prompt", "data.max_length=64", "--show", "1") == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("...")]
    cut = int(line.split()[3])
    assert line == f"... finetune removed {cut} tokens of the prompt" and cut > 200
    assert "end?" in shown and shown_as_trained(shown) == ["yes<|im_end|>"]
    assert "note: 1 of 2 examples have a shortened prompt" in shown


def test_every_token_can_be_told_and_none_is_lost(tokenizer) -> None:
    """The tokens of one character come as one; texts add up to the text, ids to the ids."""
    text = "é 😀😀 中\n\n  x" + ANSWERS[2]
    ids = tokenizer(text)["input_ids"]
    for cut in range(1, len(ids)):  # also where a document ends inside of a character
        row = {"input_ids": ids, "labels": [-100, *ids[1:]], "where": ["a", "b"], "cut": [0, 0]}
        row["seq_lengths"] = [cut, len(ids) - cut]
        found = preview.documents(tokenizer, row)
        for document, part in zip(found, (ids[:cut], ids[cut:]), strict=True):
            tokens = [token for piece in document.pieces for token in piece.tokens]
            assert [i for token in tokens for i in token.ids] == part
            whole = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            assert "".join(token.text for token in tokens) == whole
    (whole,) = preview.documents(tokenizer, {**row, "seq_lengths": None, "where": ["a"], "cut": [0]})
    smileys = [token for piece in whole.pieces for token in piece.tokens if "😀" in token.text]
    assert len(smileys) == 3 and all(len(token.ids) > 1 for token in smileys)
    assert (whole.tokens, whole.trained) == (len(ids), len(ids) - 1)


def test_a_character_s_title_says_which_of_its_tokens_carry_loss(tokenizer) -> None:
    ids = tokenizer("😀 so")["input_ids"]
    row = {"input_ids": ids, "labels": [-100, *ids[1:]], "where": ["a"], "cut": [0]}
    first = preview.documents(tokenizer, row)[0].pieces[0].tokens[0]
    assert first.title == f"tokens {' '.join(map(str, first.ids))}, in the loss: 3 of 4"
    row["labels"] = [-100] * len(ids)
    assert preview.documents(tokenizer, row)[0].pieces[0].tokens[-1].title.endswith("not in the loss")


def test_special_tokens_are_told_from_their_spelling(tokenizer) -> None:
    ids = [*tokenizer("<|im_")["input_ids"], *tokenizer("end|>")["input_ids"]]
    ids += tokenizer("<|im_end|>")["input_ids"]
    row = {"input_ids": ids, "labels": ids, "where": ["a"], "cut": [0]}
    (document,) = preview.documents(tokenizer, row)
    found = [(piece.text, piece.kind) for piece in document.pieces]
    assert found == [("<|im_end|>", "trained"), ("<|im_end|>", "special-trained")]


def test_what_acts_on_a_terminal_is_shown_not_sent(data, capsys, chats) -> None:
    write(chats, [("\x1b[31mred\x07 \u202eright to left", "a\x00b")])
    assert data() == 0
    shown = capsys.readouterr().out
    assert "\\u001b[31mred\\u0007 \\u202eright to left" in shown and "a\\u0000b" in shown
    assert not set("\x1b\x07\x00\u202e") & set(shown)


def test_with_colors_there_are_no_brackets(data, tmp_path, chats) -> None:
    recipe = load_recipe(QUICKSTART, [f"data.name={chats}", f"data.cache_dir={tmp_path / 'cache'}"])
    tokenizer, prepared = load_data.prepare_data(recipe)
    screen = Console()
    screen.console = RichConsole(force_terminal=True, color_system="standard", record=True, quiet=False)
    with screen.console.capture() as captured:
        preview.show(screen, tokenizer, prepared, 4)
    text = captured.get()
    assert "\x1b[32mMaria did.\x1b[0m\x1b[1;4;32m<|im_end|>\x1b[0m" in text
    assert "【" not in text and preview.SPECIAL[0] not in text and "[bold]markup[/bold]" in text


def test_the_page_holds_the_rows_and_loads_nothing(data, tmp_path, chats, capsys) -> None:
    path = tmp_path / "new folder" / "page.html"
    chats = chats.rename(tmp_path / "<script>chats.jsonl")
    assert data(f"data.name={chats}", "--html", str(path), "data.packing=true", "data.max_length=512") == 0
    page = Page(path)
    text = path.read_text(encoding="utf-8")
    assert not any("//" in link for link in page.loaded) and "@import" not in text and "url(" not in text
    assert page.loaded.count("script") == 1 and ">&lt;</i>" in text and "><</i>" not in text
    assert sorted(unsigned("".join(page.loss)).split("<|im_end|>")[:-1]) == sorted(ANSWERS)
    assert all(question in page.text for question in QUESTIONS) and f"{chats}:4" in page.text
    assert any(title.startswith("token ") and title.endswith(", in the loss") for title in page.titles)
    assert "without a change" in text and "512" in text
    assert "【" not in capsys.readouterr().out  # rows are on the page


def test_the_page_says_every_remark(data, tmp_path, chats, capsys) -> None:
    write(chats, [*zip(QUESTIONS, ANSWERS, strict=True), ("Who came?", "Maria did."), ("w " * 99, "long")])
    with chats.open("a") as file:
        file.write('not json\n{"messages": [{"role": "user", "content": "a"}]}\n')
    more, held_out = tmp_path / "more.jsonl", tmp_path / "validation.jsonl"
    write(more, [("One?", "<think>hm</think>two")])
    write(held_out, [("Three?", "<think>hm</think>four")])
    sources = json.dumps([{"name": str(chats), "weight": 2}, {"name": str(more)}])
    limits = [f"data.expect.{name}=1" for name in ("unreadable", "dropped", "duplicates")]
    arguments = [f"data.name={sources}", "data.max_length=160", f"data.validation={held_out}", *limits]
    path = tmp_path / "page.html"
    assert data(*arguments, "--html", str(path)) == 0
    page, shown = Page(path), " ".join(capsys.readouterr().out.split())
    (written,) = (tmp_path / "cache").glob("*/report.json")
    held = json.loads(written.read_text())
    reports = {name: Report(**held[name]) for name in ("train", "validation")}
    remarks = [*reports["train"].remarks(), *reports["validation"].remarks()]
    assert len(remarks) == 6
    assert all(remark in page.text and remark in shown for remark in remarks)
    assert (
        "validation set: 1 of 1 examples have reasoning" in page.text and "without a change" not in page.text
    )
    assert shown.count("skipped: ") == 3 and shown.index("skipped: ") < shown.index("note: ")
    assert str(more) in page.text and "weight 2" in page.text and "weight 2" in shown


def test_prepare_fills_a_folder_that_training_finds(data, tmp_path, capsys) -> None:
    folder = tmp_path / "kept data"
    assert data("--prepare", str(folder)) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("next, train: ")]
    command = shlex.split(line.removeprefix("next, train: "))
    assert command[:3] == ["finetune", "train", str(QUICKSTART)] and command[-1] == f"data.cache_dir={folder}"
    assert "【" not in shown
    recipe = load_recipe(command[2], command[3:])
    _, prepared = load_data.prepare_data(recipe)
    assert prepared.cached and prepared.path.parent == folder
    assert data(f"data.cache_dir={folder}", "--show", "0") == 0
    assert "earlier (cached)" in capsys.readouterr().out


def test_streamed_rows_can_be_looked_at(data, capsys) -> None:
    assert data("data.streaming=true", "train.max_steps=2", "--show", "4") == 0
    shown = capsys.readouterr().out
    assert sorted(shown_as_trained(shown)) == sorted(f"{answer}<|im_end|>" for answer in ANSWERS)
    assert data("data.streaming=true", "train.max_steps=2", "--prepare", "somewhere") == 2
    assert "--prepare can't prepare a stream" in capsys.readouterr().err


def test_quiet_says_nothing(data, capsys) -> None:
    assert data("--quiet", "--show", "3") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("option", ["--html", "--prepare"])
def test_what_can_t_be_written_is_said(option: str, data, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert data(option, str(tmp_path / "file" / "page.html")) == 2
    assert "finetune can't write to this path" in capsys.readouterr().err
    if option == "--html":
        assert data(option, str(tmp_path)) == 2
        assert f"error: finetune can't write to this path ({tmp_path})" in capsys.readouterr().err


def test_a_negative_number_of_rows_is_refused(data, capsys) -> None:
    assert data("--show", "-1") == 2
    assert "--show" in capsys.readouterr().err
