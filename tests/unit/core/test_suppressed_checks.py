"""A check that code switches off has the reason next to it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDERS = ("benchmarks", "docs", "examples", "finetune", "scripts", "tests")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MARKER = re.compile(r"#\s*(ruff: )?(noqa|type: ignore|pyright: ignore)")
WITH_REASON = re.compile(MARKER.pattern + r".*\(.+\)")
SUSPECT = re.compile("noqa|ignore|filter|Exception|except:|skip|xfail")  # most files have none of these words
FILTERS, BROAD = {"filterwarnings", "simplefilter"}, {"Exception", "BaseException"}
SKIPS = {"skip", "skipif", "xfail"}  # their reason is an argument


def without_reason(source: str) -> list[int]:
    """Return the lines that switch off a check and do not say why."""
    if not SUSPECT.search(source):
        return []
    suppressions = [*_suppressions(ast.parse(source))]
    if not suppressions and not MARKER.search(source):
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {one.start[0]: one.string for one in tokens if one.type == tokenize.COMMENT}
    markers = [n for n, text in comments.items() if MARKER.search(text) and not WITH_REASON.search(text)]
    lines = source.splitlines()
    code = [line for line, last in suppressions if not _explained(line, last, lines, comments)]
    return sorted({*markers, *code})


def _suppressions(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield the lines of warning filters, of handlers of all exceptions, and of skips without a reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or _is_broad([node.type])):
            yield node.lineno, node.lineno
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        filters = name in FILTERS or (name == "suppress" and _is_broad(node.args))
        has_reason = any(one.arg == "reason" for one in node.keywords) or (name == "skip" and node.args)
        if filters or (name in SKIPS and not has_reason):
            yield node.lineno, node.end_lineno or node.lineno


def _is_broad(types: list[ast.expr]) -> bool:
    """Whether one of these types, or a type in one of these tuples, stands for all exceptions."""
    every = [one for kind in types for one in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
    return any(isinstance(one, ast.Name) and one.id in BROAD for one in every)


def _explained(line: int, last: int, lines: list[str], comments: dict[int, str]) -> bool:
    """Whether a comment is on these lines, above them, or above the decorators of the same function."""
    above = line - 1
    while lines[above - 1].startswith("@"):
        above -= 1
    return any(one in comments for one in range(above, last + 1))


def test_suppressed_checks_have_reasons() -> None:
    assert not [f"{path}:{line}" for path in FILES for line in without_reason(path.read_text())]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import a  # noqa: E402", [1]),
        ("import a  # noqa: E402 (after the line above)", []),
        ("# ruff: noqa: E501", [1]),
        ("f(1)  # type: ignore[arg-type]\ng('# noqa')", [1]),
        ("f(1)  # type: ignore[arg-type]  (any module)", []),
        ("import warnings\nwarnings.simplefilter('ignore')", [2]),
        ("# PEFT warns of each layer\nwarnings.simplefilter('ignore')", []),
        ("# of torch\n@pytest.mark.soak\n@pytest.mark.filterwarnings('ignore')\ndef test(): ...", []),
        ("@pytest.mark.soak\n@pytest.mark.filterwarnings('ignore')\ndef test(): ...", [2]),
        ("try:\n    f()\nexcept Exception:\n    g()", [3]),
        ("try:\n    f()\nexcept BaseException:  # Ctrl-C too\n    g()", []),
        ("try:\n    f()\nexcept (OSError, Exception):\n    g()", [3]),
        ("try:\n    f()\nexcept:\n    g()", [3]),
        ("with contextlib.suppress(Exception):\n    f()", [1]),
        ("with contextlib.suppress(OSError):\n    f()", []),
        ("pytest.skip()", [1]),
        ("pytest.skip('no GPU')\npytest.mark.skipif(a, reason='no GPU')", []),
        ("@pytest.mark.xfail\ndef test(): ...\npytest.mark.skipif(a)", [3]),
    ],
)
def test_without_reason_finds_suppressions(source: str, lines: list[int]) -> None:
    assert without_reason(source) == lines
