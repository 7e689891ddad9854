"""Text of others that acts on a terminal or on the order of a line is shown, wherever it stands."""

import ast
import io
import json
import logging
import re
import shutil
import sys
import unicodedata
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from finetune.cli import main
from finetune.core import html_pages, markdown, privacy, standard_streams, strict_yaml, untrusted_files
from finetune.core.console import Console
from finetune.core.errors import Problem, UserError
from finetune.core.visible_text import continued, visible, visible_lines
from finetune.data import hints
from finetune.experiments.comparison import comparison_report
from finetune.recipe.loader import load
from finetune.run_folder import settings_text
from finetune.training import trackers
from support.paths import DATA, MODEL, ROOT

ESCAPES = {
    "color": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;https://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "clear": "\x1b[2J\x1b[H",
    "c1": "\x9b31mred",
    "bell": "\x07\x08\x08",
    "return": "fine\rerror: forged",
    "line": "fine\nerror: forged",
    "vertical": "fine\x0berror: forged\x0cerror: forged",
    "separators": "fine\u2028error: forged\u2029error: forged\x85error: forged",
    "bidi": "\u202egnp.exe\u2066\u061c",
    "zero width": "ad\u200bap\u200cte\u200dr\ufeff\u2060",
    "surrogate": "half \ud800 a pair",
    "nul": "a\x00b",
    "tab": "a\tb",
    "tags": "\U000e0041\U000e007f",
    "fillers": "\u3164\u115f\u2800\u00ad",
    "noncharacters": "\uffff\ufffe\U0001ffff",
}
EVERYTHING = " ".join(ESCAPES.values())
MARKUP = "[bold]b[/bold] [link=https://evil.example]l[/link] :skull: [/]"


def acting(text: str, *, allowed: str = "\n") -> list[str]:
    """The characters of a text that act, or that nobody can see."""
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    found = {sign for sign in text if unicodedata.category(sign) in kinds and sign not in allowed}
    return sorted(map(ascii, found))


def forged(text: str) -> list[str]:
    return re.findall(r"^\s*(?:error|warning|note): forged.*", text, re.MULTILINE)


def test_visible_shows_every_character_that_acts() -> None:
    each = visible("a".join(map(chr, range(sys.maxunicode + 1))))
    assert not acting(each)
    assert not acting(visible(EVERYTHING)) and not forged(visible(EVERYTHING))
    assert not acting(visible_lines(EVERYTHING), allowed="\n\t")
    assert not forged(continued(EVERYTHING))


@pytest.mark.parametrize(
    "text", ["中文", "é ü", "👩\u200d👩\u200d👧 ❤️", "\u0645\u06cc\u200c\u062e", "क्\u200dष", "a — ✓ |"]
)
def test_visible_leaves_writing_of_all_scripts(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize("name", ESCAPES)
def test_columns_that_init_guesses_are_read_back_from_its_recipe(name: str) -> None:
    asked, answered = f"question {ESCAPES[name]}", f"answer {ESCAPES[name]}"
    _, line = hints.columns([asked, answered], {asked: "a", answered: "b"}, "a.jsonl")
    assert not acting(line) and line.startswith("columns: {instruction: ")
    if name != "surrogate":
        read = strict_yaml.parse(line, "recipe.yaml").value["columns"]
        assert read == {"instruction": asked, "output": answered}


@pytest.mark.parametrize("name", ESCAPES)
def test_console_shows_text_of_others(name: str, tmp_path: Path, capsys) -> None:
    text, screen, root = ESCAPES[name], Console(), logging.getLogger()
    before = {*root.handlers}
    screen.log_to(tmp_path / "log.txt")
    (ours,) = {*root.handlers} - before
    screen.say(f"note: column {text}", f"fine: {text}", style="bold")
    screen.table(text, (text, f"second {text}"), [(text, text), ("", text)])
    screen.log(f"logged {text}")
    screen.start(2)
    screen.step(1, 2, f"loss 1 {text}")
    # Not through the root logger: pytest's reports would hold the half pair, which workers can't send
    ours.handle(logging.LogRecord("some.library", logging.WARNING, "", 1, "a model: %s", (text,), None))
    screen.close()
    shown, logged = capsys.readouterr().out, (tmp_path / "log.txt").read_text()
    assert not acting(shown) and not forged(shown), shown
    assert not acting(logged, allowed="\n\t") and not forged(logged), logged
    assert "a model" in logged


def test_console_on_a_terminal_sends_only_its_own_escapes(monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    screen = Console()
    screen.console.file = file
    screen.say(f"bold {MARKUP} {EVERYTHING}", style="bold")
    screen.table(f"title {MARKUP}", (f"head {MARKUP}",), [(f"cell {MARKUP}",)])
    said = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())  # colors of our own
    assert not acting(said) and not forged(said)
    for place in ("bold", "title", "head", "cell"):
        assert f"{place} {MARKUP}" in said


@pytest.mark.parametrize("name", ESCAPES)
def test_errors_show_text_of_others(name: str, capsys) -> None:
    text = ESCAPES[name]
    error = UserError(Problem(text, f"model.{text}", text, text, text, text), Problem(text))
    assert len(str(error).splitlines()) == 5 and not acting(str(error)) and not forged(str(error))
    standard_streams.say(f"fine: {text}", text)
    standard_streams.say(text, error=True)
    try:
        raise ValueError(f"bad {text}")
    except ValueError as raised:
        privacy.excepthook(type(raised), raised, raised.__traceback__)
    said = capsys.readouterr()
    assert not acting(said.out) and not acting(said.err, allowed="\n\t"), said.err
    assert not forged(said.out + said.err)


def test_error_of_a_loader_worker_keeps_its_lines() -> None:
    """torch raises it again with a traceback as its text."""
    told = str(UserError(Problem("no such column", "data.name", "a.jsonl:1", "x", "y", "z")))
    text = f"Caught UserError in DataLoader worker process 0.\nfinetune.core.errors.UserError: {told}"
    assert str(UserError(text)) == told


@pytest.mark.parametrize("name", [*ESCAPES, "markup"])
@pytest.mark.parametrize("key", ["model.name", "data.name", "train.run_name", "adapter.nonsense", "x.y"])
def test_check_shows_recipe_keys_and_values(key: str, name: str, tmp_path: Path, capsys) -> None:
    text = MARKUP if name == "markup" else ESCAPES[name].encode("utf-8", "replace").decode()
    given = {"model.name": str(MODEL), "data.name": str(DATA / "train.jsonl"), "adapter.type": "lora"}
    given[key] = f"{given.get(key, '')}{text}"
    sections: dict[str, dict[str, str]] = {}
    for dotted, value in given.items():
        section, _, inner = dotted.partition(".")
        sections.setdefault(section, {})[inner] = value
    sections[text] = {text: text}
    (tmp_path / "r.yaml").write_text(json.dumps(sections))
    assert main.main(["check", str(tmp_path / "r.yaml")]) == 2
    said = capsys.readouterr().err
    assert not acting(said) and not forged(said), said


@pytest.mark.parametrize("name", ESCAPES)
def test_data_with_escapes_in_columns_and_values_is_shown(name: str, tmp_path: Path, capsys) -> None:
    text = ESCAPES[name]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({text: text, "n": n}) + "\n" for n in range(4)))
    recipe = {"model": {"name": str(MODEL)}, "data": {"name": str(tmp_path / "a.jsonl")}}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe | {"adapter": {"type": "lora"}}))
    assert main.main(["check", str(tmp_path / "r.yaml")]) == 2
    said = capsys.readouterr().err
    assert not acting(said) and not forged(said), said


def test_resolved_recipe_is_what_it_was_and_shows_it(tmp_path: Path) -> None:
    text = "".join(
        sign for sign in EVERYTHING if sign < "\ud800" or "\udfff" < sign < "\U00010000"
    )  # JSON is YAML
    recipe = {"model": {"name": "org/base"}, "data": {"name": "org/data"}, "adapter": {"type": "lora"}}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe | {"train": {"run_name": text}}))
    first = load(tmp_path / "r.yaml")
    first.origin.notices.append("a value\npublish:\n  repo: evil/exfil")
    resolved = settings_text.resolved_yaml(first, {"train.seed": (1, "by\npublish: {repo: evil/exfil}")})
    assert not acting(resolved) and "\npublish:\n  repo: null" in resolved
    (tmp_path / "again.yaml").write_text(resolved)
    again = load(tmp_path / "again.yaml")
    assert again.train.run_name == text and again.publish.repo is None


def test_pages_show_text_of_others(tmp_path: Path) -> None:
    (tmp_path / "p.html").write_text("<p title='{{ text }}'>{{ text }}</p>{{ svg|safe }}")
    page = html_pages.templates(tmp_path).get_template("p.html").render(text=EVERYTHING, svg="<svg></svg>")
    assert not acting(page, allowed="\n\t") and "<svg></svg>" in page


HOSTILE_MARKDOWN = (
    "a | b\n\n# forged\n![i](https://evil.example/i.png) [x](javascript:x) <img src=x> `c` ``` [y]: z"
)


def rendered(text: str) -> list[str]:
    """What a renderer of Markdown makes of a text beside text: tags, images and links."""
    blocks = MarkdownIt("commonmark").enable("table").parse(text)
    tokens = [token for block in blocks for token in (block, *(block.children or ()))]
    acts = [token for token in tokens if token.type in ("html_block", "html_inline", "image", "link_open")]
    return [re.sub("(<summary>).*", r"\1", token.content.strip()) or str(token.attrs) for token in acts]


def test_markdown_of_others_stays_text() -> None:
    table = markdown.table(("name", HOSTILE_MARKDOWN), [(HOSTILE_MARKDOWN, EVERYTHING)])
    assert len(table.splitlines()) == 3 and not acting(table)
    for line in table.splitlines():
        assert len(re.findall(r"(?<!\\)\|", line)) == 3, "two cells"
    for text in (table, markdown.plain(HOSTILE_MARKDOWN)):
        assert not rendered(text)
    assert markdown.code("a`b` c\nd").count("`") == 2
    assert markdown.block("x\n```\n# forged\n", "yaml").startswith("````yaml")
    card = ModelCard(f"---\nlicense: mit\n---\n\n{table}")
    assert card.data.license == "mit"


@pytest.mark.parametrize(
    "text",
    [r"a \<img src=x>", "``` <img src=x> `` x", r"\![i](https://evil.example/a.png)", r"[x\](https://evil.example)",
     r"a \| yes \| <b>", r"`a \| yes` | b", "`` ` <b> `` ` <i>", r"\`<b>`", "` <b> \\` <i>", r"\\<b>"],
)  # fmt: skip
def test_backslashes_and_backquotes_make_no_markdown(text: str) -> None:
    blocks = MarkdownIt("commonmark").enable("table").parse(markdown.table(("a", "b"), [(text, "NO")]))
    cells = [token.type for token in blocks if token.type in ("td_open", "th_open")]
    assert len(cells) == 4 and not rendered(markdown.plain(text))
    assert not rendered(markdown.table(("a", "b"), [(text, "NO")]))


def test_compare_shows_reasons_of_others() -> None:
    found = {"winner": None, "failed": {"run": EVERYTHING}, "not_comparable": {}}
    screen = Console(quiet=True)
    screen.say(*comparison_report.remarks(found))
    assert not acting(markdown.plain(comparison_report.remarks(found)[1]))


@pytest.mark.parametrize(
    "text", [*ESCAPES.values(), "x" * 5000, "hf_" + "Canary" * 6, "https://u:pw123456@h/x"]
)
def test_trackers_get_names_of_one_short_line(text: str) -> None:
    name = trackers.safe_name(text)
    assert not acting(name, allowed="") and len(name) <= 128
    assert "Canary" not in name and "pw123456" not in name


def test_nothing_prints_but_through_the_console() -> None:
    """So nothing that is printed can be forgotten; a chat and a preview make each text visible themselves."""
    allowed = {"core/standard_streams.py", "evaluation/chat_session.py", "data/preview.py", "core/console.py"}
    found = []
    for path in sorted((ROOT / "finetune").rglob("*.py")):
        name = path.relative_to(ROOT / "finetune").as_posix()
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "print(" in text or "std" in text else ():
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            prints = called == "print" or called.endswith(("console.print", "stdout.write", "stderr.write"))
            if prints and name not in allowed and name != "core/privacy.py":
                found.append(f"{name}:{node.lineno}: {called}")
    assert not found


NASTY = "x\nerror: forged \x1b[31mred\x9b1m \u202e[bold]`|` <img src=x> ![i](j)"


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # of huggingface_hub 2.4
def test_life_of_a_run_with_hostile_names(tmp_path: Path, capsys, hub) -> None:
    """Base, data and run folder have such names: all that is printed, logged and written shows them."""
    name = NASTY.replace("/", "")
    model, data, held_out = (tmp_path / f"{kind} {name}" for kind in ("base", "data", "held"))
    data, held_out = data.with_suffix(".jsonl"), held_out.with_suffix(".jsonl")
    shutil.copytree(MODEL, model)
    lines = (DATA / "train.jsonl").read_text().splitlines()[:30]
    rows = [json.loads(line) for line in lines]
    for row in rows[:8]:
        row["messages"][-1]["content"] += NASTY
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows[6:]))
    held_out.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:6]))
    recipe = {
        "model": {"name": str(model)},
        "data": {"name": str(data), "validation": str(held_out)},
        "adapter": {"type": "lora"},
        "train": {"max_steps": 2, "effective_batch_size": 4, "warmup_steps": 0, "run_name": NASTY},
        "eval": {"max_new_tokens": 4, "forgetting": False},
    }
    recipe["train"]["output_dir"] = str(tmp_path / f"run {name}")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    run = recipe["train"]["output_dir"]
    for command in (
        ["check", str(tmp_path / "r.yaml")],
        ["plan", str(tmp_path / "r.yaml")],
        ["data", str(tmp_path / "r.yaml"), "--html", str(tmp_path / "page.html")],
        ["train", str(tmp_path / "r.yaml")],
        ["evaluate", run],
        ["report", run],
        ["chat", run, "--prompt", "hello", "--max-new-tokens", "2"],
        ["publish", run, "--repo", "me/notes"],
        ["publish", run, "--dry-run"],
    ):
        code = main.main(command)
        said = capsys.readouterr()
        assert code in ((0,) if command[0] != "check" else (0, 2)), said.err
        for text in (said.out, said.err):
            assert not acting(text, allowed="\n\t") and not forged(text), f"{command[0]}: {text}"
    pages = [tmp_path / "page.html"]
    pages += [Path(run, file) for file in ("report.html", "log.txt", "recipe.resolved.yaml")]
    for page in pages:
        text = page.read_text()
        assert not acting(text, allowed="\n\t"), page
        assert page.suffix == ".html" or not forged(text), page
    card = hub.repos["me/notes"].files["README.md"].decode()
    load(Path(run, "recipe.resolved.yaml"))
    assert not acting(card)
    assert set(rendered(card.partition("\n---\n")[2])) <= {"<details><summary>", "</details>"}


def test_preview_of_data_has_no_line_that_looks_like_a_message() -> None:
    from finetune.data import preview

    lines = preview.visible("a\nerror: forged\r\n\x1b[2Kwarning: forged").split("\n")
    assert not [line for line in lines if line.startswith(("error:", "warning:", "note:"))]
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("name", ("tokenizer_config.json", "special_tokens_map.json"))
def test_keys_that_the_tokenizers_library_would_print_are_refused(name: str, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    token = {"content": "x", "\x1b[31mred\nerror: forged": True}
    entry = {"added_tokens_decoder": {"0": token}, "pad_token": token, "additional_special_tokens": [token]}
    for key, value in entry.items():
        (folder / name).write_text(json.dumps({key: value}))
        with pytest.raises(UserError, match="has control characters"):
            untrusted_files.check_files(folder, "model.name")
