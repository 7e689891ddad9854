"""SECURITY.md promises only what a test shows."""

import re

from support.paths import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()
FILE = re.compile(r"`((?:security|unit|integration|distributed|properties)/[\w/]+\.py)`")


def test_security_page_names_a_test_for_each_promise() -> None:
    section = PAGE.split("## What finetune promises")[1].split("\n## ")[0]
    promises = [promise.split("\n\n")[0] for promise in section.split("\n- ")[1:]]
    assert len(promises) > 20
    for promise in promises:
        assert FILE.findall(promise), promise


def test_security_page_names_tests_that_exist() -> None:
    files = FILE.findall(PAGE)
    assert files and len(re.findall(r"test_\w+\.py", PAGE)) == len(files)
    for name in files:
        assert "\ndef test_" in (ROOT / "tests" / name).read_text(), name


def test_security_page_names_each_test_of_security() -> None:
    own = {f"security/{path.name}" for path in (ROOT / "tests" / "security").glob("test_*.py")}
    assert own - set(FILE.findall(PAGE)) == {"security/test_security_page.py"}
