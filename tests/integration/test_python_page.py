"""docs/python.md: its examples run as they stand, and its names are those of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import finetune
from finetune import speed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


# TRL's default pins memory, of which torch warns where there is no GPU
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_example_of_the_python_page_runs(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("examples", "recipes"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[index], f"docs/python.md, example {index + 1}", "exec"), {})


def test_table_of_the_python_page_lists_every_public_function() -> None:
    listed = set(re.findall(r"^\| `([\w.]+)\(", PAGE, flags=re.MULTILINE))
    public = {name for name in finetune.__all__ if name[0].islower() and name != "speed"}
    assert listed == public | {f"speed.{name}" for name in speed.__all__}
