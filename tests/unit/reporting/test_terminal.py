"""What a finished run prints about its run checks."""

import pytest

from finetune.core.console import Console
from finetune.core.run_checks import RunChecks
from finetune.reporting import terminal


@pytest.mark.parametrize(
    ("verbose", "passed", "is_table"),
    [(False, True, False), (True, True, True), (False, False, True)],
)
def test_table_of_run_checks_only_with_verbose_or_a_failed_check(verbose, passed, is_table, capsys) -> None:
    checks = RunChecks()
    checks.add("steps", 2, 2, "counted")
    checks.add("optimizer", "adamw", "adamw" if passed else "sgd", "its class")
    terminal.show_checks(Console(verbose=verbose), checks)
    said = capsys.readouterr().out
    assert f"{1 + passed} of 2 run checks passed (checks.json)" in said
    assert ("optimizer" in said) == is_table
