"""The documentation: its commands and examples run, its links resolve, its numbers come from measurements.

`make docs-test` runs the commands and examples of all pages. `make test` runs those of one page.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.core import strict_yaml
from finetune.evaluation import tasks
from finetune.experiments.sweep import search_space
from finetune.recipe import loader
from finetune.recipe.schema import Recipe
from support import pages
from support.paths import ROOT
from support.scripts import module_of
from support.words import house_words

SHORT = ["train.max_steps=1", "train.warmup_steps=0", "train.effective_batch_size=2", "eval.max_new_tokens=4"]
SECTIONS = set(Recipe.model_fields)
SAMPLE = "README.md"  # the page whose commands and examples `make test` runs
OTHER_PROGRAMS = ("make", "source", "pip", "export", "echo", "ls", "llama-cli", "llama-server")
GENERATED = ("optimizations.md", "recipe_gallery.md", "adapters.md", "launch_matrix.md")


def _sample(page: Path) -> tuple[pytest.MarkDecorator, ...]:
    return () if str(page.relative_to(ROOT)) == SAMPLE else (pytest.mark.soak,)


def _pages_with(language: str) -> list[Any]:
    found = [page for page in pages.WITH_README if pages.blocks(page, language)]
    return [pytest.param(page, id=str(page.relative_to(ROOT)), marks=_sample(page)) for page in found]


@pytest.fixture
def workplace(tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the project's files and two finished runs, as a reader of the documentation has it."""
    folder = tmp_path / "workplace"
    folder.mkdir()
    for name in ("examples", "recipes", "scripts", "accelerate_configs", "locks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "runs").mkdir()
    for name in ("quickstart", "reviews"):
        trained().path.rename(folder / "runs" / name)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("page", _pages_with("bash"))
def test_the_console_lines_of_a_page_run(page: Path, workplace, small, two_layers, capsys) -> None:
    for name, text in pages.saved_files(page).items():
        Path(name).write_text(text)
    for place, command in pages.commands(page):
        words = shlex.split(command)
        if words[0] in OTHER_PROGRAMS:
            continue
        if words[-1] == "--help":
            with pytest.raises(SystemExit, match="0"):
                main.main(words[1:])
            continue
        assert words[0] == "finetune", place
        for word in words:  # the page trains a run that the workplace has for other pages
            if words[1] == "train" and word.startswith("train.output_dir="):
                shutil.rmtree(word.partition("=")[2], ignore_errors=True)
        said = main.main(_cut_short(words[1:], small, two_layers))
        assert said == 0, f"{place}: {command}\n{capsys.readouterr().err}"


def _cut_short(words: list[str], small: tuple[str, str], model: Path) -> list[str]:
    """A command whose run is as short as possible."""
    name, recipe = words[0], words[1] if len(words) > 1 else ""
    own = [*small, f"model.name={model}"] if recipe == "quickstart" else []
    if name == "train":
        if "--accelerate" in words:
            return ["check", recipe]  # test_train.py has launches
        stated = [word for word in SHORT if word.partition("=")[0] not in " ".join(words)]
        return [*words, *stated, "eval.forgetting=false", *own]
    if name == "compare" and "--adapters" in words:
        return [*words, *SHORT, "eval.forgetting=false", *own]
    if name == "profile":
        return [*words, *own, "eval.forgetting=false"]
    if name == "check" and words[-1] in ("--verify-resume", "--rehearse"):
        return [*words, *own]
    if name == "evaluate":
        return [*words, "eval.limit=4"]
    return words


@pytest.mark.parametrize("page", _pages_with("yaml"))
def test_the_yaml_blocks_of_a_page_load(page: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    for block in pages.blocks(page, "yaml"):
        value = strict_yaml.parse(block.text, str(block)).value
        assert isinstance(value, dict), block
        file = tmp_path / "block.yaml"
        if value.keys() <= SECTIONS:
            whole = _completed(value)
            file.write_text(json.dumps(whole))
            assert loader.load(file).origin.notices == [], block
        elif "space" in value:
            file.write_text(block.text)
            search_space.read(file)
        else:
            assert "kind" in value, f"{block}: a recipe, a space or a task"
            file.write_text(block.text)
            (tmp_path / value["data"]).write_text('{"question": "q", "choices": ["a", "b"], "gold": 1}\n')
            tasks.Task.model_validate({"task": "block", **value})


def _completed(value: dict[str, Any]) -> dict[str, Any]:
    """A recipe with the keys that a block leaves out."""
    required = {"model": {"name": "m"}, "data": {"name": "d"}, "adapter": {"type": "lora"}}
    return {**value, **{name: {**keys, **value.get(name, {})} for name, keys in required.items()}}


# TRL's default pins memory, of which torch warns where there is no GPU
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.parametrize("page", _pages_with("python"))
def test_the_python_blocks_of_a_page_run(page: Path, workplace, capsys) -> None:
    if "runs/quickstart/merged" in page.read_text():
        assert main.main(["merge", "runs/quickstart"]) == 0, capsys.readouterr().err
    for block in pages.blocks(page, "python"):
        exec(compile(block.text, str(block), "exec"), {})


@pytest.mark.parametrize("page", pages.WITH_README, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_resolve(page: Path) -> None:
    text = re.sub(r"```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in _anchors(file), f"{page.name}: {target}"


def _anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub and MyST make them."""
    text = re.sub(r"```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    heads = re.findall(r"^#{1,3} (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = {pages.DOCS / "index.md"}
    for page in pages.PAGES:
        for toctree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), flags=re.S):
            names = [line for line in toctree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert set(pages.PAGES) == listed


@pytest.mark.parametrize("page", pages.WITH_README, ids=lambda page: str(page.relative_to(ROOT)))
def test_speed_and_memory_of_a_page_come_from_measurements(page: Path) -> None:
    """A number of tokens/s or GiB stands in a generated table, or in the notes of benchmarks.md."""
    if page.name in GENERATED or page.name == "benchmarks.md":
        return
    found = re.findall(r"\d[\d,.]* (?:tokens/s|GiB)\b", pages.prose(page))
    assert found == [], page


@pytest.mark.parametrize("page", pages.WITH_README, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_uses_the_field_s_words(page: Path) -> None:
    text = re.sub(
        r"```.*?^```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", "", page.read_text("utf-8"), flags=re.S | re.M
    )
    text = re.sub(r'"[^"\n]*"', "", text)  # quotations of older output
    assert house_words(text) == [], page


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_block_of_a_page_names_its_language(page: Path) -> None:
    assert [str(block) for block in pages.blocks(page) if not block.language] == []


def test_the_generated_pages_are_current() -> None:
    for path, text in module_of("scripts", "make_reference").pages().items():
        assert path.read_text(encoding="utf-8") == text, f"scripts/make_reference.py: {path.name}"


def test_the_diagrams_are_current() -> None:
    diagrams = module_of("scripts", "make_diagrams")
    for name, text in diagrams.diagrams().items():
        assert (diagrams.IMAGES / name).read_text(encoding="utf-8") == text, f"make_diagrams.py: {name}"


def test_the_pictures_of_the_terminal_show_what_the_commands_print() -> None:
    """Numbers may differ: a plan is estimated from measured rates."""
    made = module_of("scripts", "make_terminal_pictures")
    for name, picture in made.pictures().items():
        stored, printed = (
            [re.sub(r"\d[\d.,]*", "0", line) for line in made.text_of(text)]
            for text in ((made.IMAGES / name).read_text(encoding="utf-8"), picture)
        )
        assert len(stored) > 8 and stored == printed, f"scripts/make_terminal_pictures.py: {name}"
