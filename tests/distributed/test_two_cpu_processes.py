"""cpu_2.yaml: two processes of a CPU train what one does, whatever the adapter; and so do ddp_2's, IA3.

LoRA by Accelerate's launcher is test_train.py's, AdaLoRA test_adalora.py's.
"""

from __future__ import annotations

import pytest

from finetune.run_folder.run_folder import RunFolder
from support import two_ranks
from support.paths import QUICKSTART, ROOT
from support.scripts import module_of
from support.soak import soak_except

RATES = {"dora": "1e-3", "ia3": "1e-2", "qlora": "1e-3", "full": "1e-4"}


@pytest.mark.usefixtures("the_only_launch")
@pytest.mark.parametrize(
    ("config", "kind", "fused"),
    soak_except(
        [("cpu_2", "full", "auto")],
        [*(("cpu_2", kind, "auto") for kind in RATES), ("ddp_2", "ia3", "auto"), ("cpu_2", "dora", "true")],
    ),
)
def test_two_processes_train_what_one_does(
    config: str, kind: str, fused: str, train, small, two_layers, tmp_path
) -> None:
    given = [
        f"adapter.type={kind}",
        f"speed.fused={fused}",
        f"train.learning_rate={RATES[kind]}",
        "train.max_steps=3",
    ]
    given += ["train.logging_steps=1", "train.per_device_train_batch_size=4", "eval.max_new_tokens=1"]
    given.append("train.effective_batch_size=8")
    one, folder = train(*given), tmp_path / "two"
    words = ["train", str(QUICKSTART), *small, f"model.name={two_layers}", *given, "--quiet"]
    words += ["train.warmup_steps=0", "eval.forgetting=false"]
    words += [f"train.output_dir={folder}"]
    launch = module_of("scripts", "launch_matrix").environment(ROOT / "accelerate_configs" / f"{config}.yaml")
    launch |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}  # as cpu_2 has it
    two_ranks.run(two_ranks.command, words, **launch)
    two_ranks.compare(one, RunFolder(folder))
