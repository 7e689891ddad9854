"""The progress of a run that trains in another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.experiments.runner import kept_runs

STEPS = '{"step": 1, "epoch": 0.5}\n{"step": 2, "epoch": 1.0}\n'


@pytest.mark.parametrize(
    ("text", "steps", "epochs", "share"),
    [
        ("", 8, None, 0.0),
        (STEPS, 8, None, 0.25),
        (STEPS, None, 4.0, 0.25),
        (STEPS, None, None, 1 / 3),
        (STEPS + '{"step": 3, "ep', 8, None, 0.25),  # a line that is being written
        ('{"step": 1}\n' * 5_000 + STEPS, 8, None, 0.25),
    ],
)
def test_share_of_steps_is_read_from_the_last_whole_line(
    text: str, steps: int | None, epochs: float | None, share: float, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    assert kept_runs.share_of_steps(tmp_path, steps, epochs)() == share


def test_share_of_steps_of_a_run_without_a_folder_is_zero(tmp_path: Path) -> None:
    assert kept_runs.share_of_steps(tmp_path / "run", 8, None)() == 0.0
