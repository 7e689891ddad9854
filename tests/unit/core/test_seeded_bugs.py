"""Each bug of benchmarks/seeded_bugs.py has its one place in the source, and a test that is there for it."""

import ast
import sys

import pytest

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import seeded_bugs


@pytest.mark.parametrize("bug", seeded_bugs.BUGS, ids=lambda bug: bug.name.partition(":")[0])
def test_a_bug_has_its_place_and_its_test(bug: seeded_bugs.Bug) -> None:
    text = (ROOT / bug.file).read_text()
    assert text.count(bug.old) == 1 and bug.old != bug.new
    ast.parse(text.replace(bug.old, bug.new))
    file, _, test = bug.test.partition("::")
    functions = {n.name for n in ast.parse((ROOT / file).read_text()).body if isinstance(n, ast.FunctionDef)}
    assert test.partition("[")[0] in functions


def test_there_are_twenty() -> None:
    assert len({bug.name for bug in seeded_bugs.BUGS}) == len(seeded_bugs.BUGS) >= 20
