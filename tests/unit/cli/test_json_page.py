"""docs/reference/json_output.md names the fields that the commands return."""

import ast

import pytest

from support.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "json_output.md").read_text(encoding="utf-8")
RESULTS = [  # command, and the function that returns its fields
    ("init", "cli/init.py", "init"),
    ("import", "cli/import_recipe.py", "import_recipe"),
    ("check", "cli/check.py", "check"),
    ("plan", "planning/plan_report.py", "as_json"),
    ("plan", "planning/plan_report.py", "_figures"),
    ("profile", "profiling/profiler.py", "as_json"),
    ("train", "cli/train.py", "_result"),
    ("train --dry-run", "cli/dry_run.py", "run"),
    ("publish --dry-run", "export/publishing.py", "show"),
    ("report", "cli/report.py", "report"),
    ("chat --prompt", "cli/chat.py", "chat"),
    ("compare RUN RUN", "cli/compare.py", "compare"),
    ("recipes", "cli/recipes.py", "recipes"),
    ("explain", "cli/explain.py", "explain"),
    ("doctor", "cli/doctor_report.py", "run"),
]


def returned_keys(file: str, function: str) -> set[str]:
    """Return the keys of the dictionaries that a function returns as literals."""
    tree = ast.parse((ROOT / "finetune" / file).read_text(encoding="utf-8"))
    (found,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    returned = [
        n.value for n in ast.walk(found) if isinstance(n, ast.Return) and isinstance(n.value, ast.Dict)
    ]
    return {key.value for one in returned for key in one.keys if isinstance(key, ast.Constant)}


@pytest.mark.parametrize(("command", "file", "function"), RESULTS)
def test_page_names_every_returned_field(command: str, file: str, function: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{command}` |"))
    keys = returned_keys(file, function)
    assert keys and {key for key in keys if f"`{key}`" not in row} == set()
