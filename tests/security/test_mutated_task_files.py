"""Changed task files are refused or evaluated: nothing runs, nothing is fetched, nothing hangs."""

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune.core.errors import UserError
from finetune.evaluation import lm_eval_harness, tasks
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe.schema import Eval, Model
from support import mutated_tasks
from support.paths import MODEL
from support.soak import soak_except

COUNT, PARTS = 5000, 33  # 152 cases in a part
SLOWEST = 5.0  # seconds


def outcome(path: Path) -> str:
    """`refused`, or `evaluated` by lm-eval's engine that answers at random."""
    from lm_eval.models.dummy import DummyLM

    settings = Eval(tasks=[str(path)], limit=2)
    try:
        tasks.check(settings)
        lm_eval_harness.check(settings)
        engine: Any = DummyLM()
        engine.tokenizer = None
        own = settings.model_copy(update={"engine": "vllm"})  # whose engine is the model itself
        subject = lm_eval_harness.Subject(engine, load_tokenizer(Model(name=str(MODEL))), own)
        ((_, specs),) = lm_eval_harness.grouped(subject).items()
        lm_eval_harness._evaluate(subject, specs, lm_eval_harness.TextOptions(False), 1, seeded=False)
    except UserError as error:
        assert error.problems and all(problem.what for problem in error.problems)
        return "refused"
    return "evaluated"


@pytest.mark.parametrize("part", soak_except([0], range(PARTS)))
def test_mutated_task_file_is_refused_or_evaluated(part: int, tmp_path, monkeypatch, no_network) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found: Counter[str] = Counter()
    for seed in range(part, COUNT, PARTS):
        path = mutated_tasks.write(seed, tmp_path)
        before, started = set(sys.modules), time.process_time()
        found[outcome(path)] += 1
        assert time.process_time() - started < SLOWEST, f"seed {seed}"
        assert not (tmp_path / "canary").exists() and "evil_module" not in set(sys.modules) - before, (
            f"seed {seed}"
        )
        assert not no_network, f"seed {seed}: {no_network}"
    assert found["refused"] > 50 and found["evaluated"] > 3, f"some of each kind: {found}"
    assert not [name for name in os.listdir(tmp_path) if "canary" in name]
