"""The notebooks run from their first cell to their last, with few steps. `make test` runs the quickstart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.pages import DOCS
from support.soak import soak_except

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
PAGE = DOCS / "tutorials" / "notebooks.md"


def _cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def _shortened(cell: dict[str, Any]) -> str:
    """The code of a cell, with further overrides in each recipe that has some."""
    code = "".join(cell["source"])
    return re.sub(r"(load_recipe\(.*?),?\s*\],?\s*\)", r"\1, *SHORT])", code, flags=re.DOTALL)


@pytest.mark.parametrize("name", soak_except(["quickstart"], [path.stem for path in NOTEBOOKS]))
def test_a_notebook_runs_from_its_first_cell_to_its_last(
    name: str, tmp_path: Path, small: tuple[str, str], two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["train.max_steps=2", "train.warmup_steps=0", "train.effective_batch_size=2"]
    short += ["eval.max_new_tokens=4", f"model.name={two_layers}"]
    namespace: dict[str, Any] = {"SHORT": short + list(small) * (name != "own_jsonl")}
    notebook = DOCS / "notebooks" / f"{name}.ipynb"
    for number, cell in enumerate(_cells(notebook, "code")):
        exec(compile(_shortened(cell), f"{notebook.name}, code cell {number}", "exec"), namespace)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_is_on_the_site(notebook: Path) -> None:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    for cell in _cells(notebook, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None
    assert f"(../notebooks/{notebook.name})" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_links_of_a_notebook_resolve(notebook: Path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in _cells(notebook, "markdown"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert (notebook.parent / target).exists(), target
