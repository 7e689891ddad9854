"""The README: its size, its set-up commands, its recipe, and the tables of all pages.

tests/docs/test_pages.py runs its other commands and follows its links.
"""

import json
import re

from finetune.recipe import loader
from support import pages
from support.paths import ROOT
from support.scripts import module_of

README = ROOT / "README.md"


def test_the_readme_is_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1100


def test_make_has_the_set_up_commands_of_the_readme() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [command.split()[1] for _, command in pages.commands(README) if command.startswith("make ")]
    assert named == ["quickstart", "test"] and set(named) <= set(targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_extras_of_the_readme_exist() -> None:
    extras = re.findall(r'pip install -e "\.\[([\w,]+)\]"', README.read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert extras and all(re.search(rf"^{name} = \[", project, re.MULTILINE) for name in extras[0].split(","))


def test_the_example_recipe_is_valid(tmp_path) -> None:
    (block,) = pages.blocks(README, "yaml")
    (tmp_path / "recipe.yaml").write_text(block.text)
    loaded = loader.load(tmp_path / "recipe.yaml")
    assert loaded.adapter.type == "lora" and loaded.origin.notices == []


def test_every_table_is_made_from_what_was_measured() -> None:
    make_tables = module_of("scripts", "make_tables")
    made = make_tables.pages()
    for page, text in made.items():
        assert (ROOT / page).read_text() == text, f"scripts/make_tables.py: {page}"
    shown = {name for text in made.values() for name in make_tables.BLOCK.findall(text)}
    files = {name: ROOT / "benchmarks" / f"{of}.json" for name, (_, of) in make_tables.TABLES.items()}
    unmeasured = {name for name, file in files.items() if not file.exists()}
    assert make_tables.TABLES.keys() - shown == {"reliability", *unmeasured}


def test_the_speed_of_evaluation_is_what_was_measured() -> None:
    evaluation = module_of("benchmarks", "evaluation")
    results = json.loads(evaluation.RESULTS.read_text())
    found = [part for name, part in results.items() if name.startswith("speed")]
    assert found
    for part in found:
        rates = part["samples_per_second"]
        assert rates["finetune"] >= rates["lm_eval"]
        assert part["accuracy"]["finetune"] == part["accuracy"]["lm_eval"]


def test_the_fp8_base_s_loss_is_near_enough_to_bf16_s() -> None:
    parity = module_of("benchmarks", "loss_parity")
    measured = json.loads(parity.RESULTS.read_text())
    assert all(one["within"] for one in measured.values())
    assert all((parity.RESULTS.parent / f"loss_parity-{data}.svg").exists() for data in measured)


def test_70b_in_48_gib_fits() -> None:
    measured = json.loads((ROOT / "benchmarks" / "gpu.json").read_text())
    assert measured["cap-48"]["peak_gib"] < 48
