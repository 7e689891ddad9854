"""accelerate_configs/cpu_2.yaml: two processes of a CPU train what one does, whatever the adapter.

LoRA by Accelerate's launcher is test_train.py's, AdaLoRA test_adalora.py's.
"""

from __future__ import annotations

import sys

import pytest
import two_ranks
from conftest import QUICKSTART, ROOT, module_of

from finetune.run_folder import RunFolder

RATES = {"dora": "1e-3", "ia3": "1e-2", "qlora": "1e-3", "full": "1e-4"}


def one_rank(words: list[str]) -> None:
    from finetune import cli

    if code := cli.main(words):
        sys.exit(code)


@pytest.mark.usefixtures("the_only_launch")
@pytest.mark.parametrize("kind", RATES)
def test_two_processes_train_what_one_does(kind: str, train, small, two_layers, tmp_path) -> None:
    given = [f"adapter.type={kind}", f"train.learning_rate={RATES[kind]}", "train.max_steps=3"]
    given += ["train.logging_steps=1", "train.per_device_train_batch_size=4", "eval.max_new_tokens=1"]
    one, folder = train(*given), tmp_path / "two"
    words = ["train", str(QUICKSTART), *small, f"model.name={two_layers}", *given, "--quiet"]
    words += ["train.warmup_steps=0", "train.effective_batch_size=8", "eval.general=false"]
    words += [f"train.output_dir={folder}"]
    launch = module_of("scripts", "launch_matrix").environment(ROOT / "accelerate_configs" / "cpu_2.yaml")
    two_ranks.run(one_rank, words, **launch)
    two_ranks.compare(one, RunFolder(folder))
