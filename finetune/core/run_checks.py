"""Run checks: the expected value, the actual value in the running system, and how finetune read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from finetune.core.errors import Exit, Problem, UserError


@dataclass(frozen=True)
class RunCheck:
    option: str
    expected: str
    actual: str
    how: str
    passed: bool
    code: Exit


@dataclass
class RunChecks:
    """The run checks of a run.

    `check` is called before training, after step 1, after training and after the saved weights are reopened.
    """

    entries: list[RunCheck] = field(default_factory=list)
    checked: int = 0
    notes: list[str] = field(default_factory=list)
    """Notes on the model, which the command prints with the plan."""

    def add(
        self,
        option: str,
        expected: object,
        actual: object,
        how: str,
        *,
        ok: bool | None = None,
        code: Exit = Exit.TRAINING,
    ) -> None:
        """Record a check. `ok` defaults to `expected == actual`. `code` is the exit code if it fails."""
        ok = expected == actual if ok is None else ok
        self.entries.append(RunCheck(option, str(expected), str(actual), how, bool(ok), code))

    def check(self) -> None:
        """Stop the run if a check that was added since the last call failed.

        Raises:
            UserError: one problem for each mismatch, with the first one's exit code.
        """
        bad = [check for check in self.entries[self.checked :] if not check.passed]
        self.checked = len(self.entries)
        if bad:
            what, found = "a run check failed", [f"{check.actual} ({check.how})" for check in bad]
            problems = [
                Problem(
                    what,
                    check.option,
                    found=actual,
                    expected=check.expected,
                    fix="change or remove this setting; if its value is right, report a bug with checks.json",
                    why="the setting that runs differs from the setting that the recipe asks for",
                    code="run-check",
                )
                for check, actual in zip(bad, found, strict=True)
            ]
            raise UserError(*problems, code=bad[0].code)

    def as_json(self) -> list[dict[str, Any]]:
        keys = ("option", "expected", "actual", "how", "passed")
        return [{key: asdict(check)[key] for key in keys} for check in self.entries]


class Choice(NamedTuple):
    value: str
    reason: str
