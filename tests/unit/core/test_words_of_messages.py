"""Messages, help and generated pages use the field's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from finetune.cli import main
from support.paths import ROOT
from support.words import house_words

PACKAGE = ROOT / "finetune"
TEMPLATE_CODE = re.compile(r"\{[{%#].*?[#%}]\}|<style>.*?</style>|<script>.*?</script>|<[^>]*>", re.S)
NAMES = {
    "/base, /tuned, /both": "commands of a chat",
    "`base`, `tuned`": "fields of eval.json",
    "left_out": "a name in code",
    "storage of the base": "a field of checkpoints of earlier versions",
}


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module with at least two words: no docstring, and no key."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in bare:
            continue
        if isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def shown(text: str) -> str:
    for name in NAMES:
        text = text.replace(name, "")
    return text


def test_messages_have_no_house_word() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": text
        for path in PACKAGE.rglob("*.py")
        for line, text in messages(path)
        if house_words(shown(text))
    }
    assert found == {}


def test_templates_of_pages_have_no_house_word() -> None:
    texts = {
        path: TEMPLATE_CODE.sub("", path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.jinja")
    }
    assert len(texts) > 4
    assert {path: words for path, text in texts.items() if (words := house_words(text))} == {}


def test_help_of_every_command_has_no_house_word() -> None:
    helps = {name: command.format_help() for name, command in main.parser()[1].items()}
    assert len(helps) > 15
    assert {name: words for name, text in helps.items() if (words := house_words(text))} == {}


def test_shipped_recipes_and_configs_have_no_house_word() -> None:
    files = [*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "accelerate_configs").rglob("*.yaml")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    assert len(texts) > 20
    assert {name: words for name, text in texts.items() if (words := house_words(text))} == {}
