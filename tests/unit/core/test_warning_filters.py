"""Warnings are errors in tests, except those about the source of other packages."""

from pathlib import Path

import pytest

from support.paths import ROOT

BAD_ESCAPE = 'text = "\\d"\n'


def test_warning_filters_on_a_third_party_file_let_it_compile(tmp_path: Path) -> None:
    for path in (tmp_path / "package.py", ROOT / ".venv" / "lib" / "site-packages" / "package.py"):
        compile(BAD_ESCAPE, str(path), "exec")


@pytest.mark.parametrize("folder", ["finetune", "scripts", "tests", "benchmarks", "examples"])
def test_warning_filters_on_an_own_file_raise_an_error(folder: str) -> None:
    with pytest.raises(SyntaxError, match="invalid escape sequence"):
        compile(BAD_ESCAPE, str(ROOT / folder / "module.py"), "exec")
