"""`finetune.load_model` in fp8 and `finetune.speed.apply`, under TRL's SFTTrainer on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import finetune
from finetune.quantization import fp8_linear
from support.paths import MODEL

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("quantization", ["none", "fp8", "nf4"])
def test_apply_on_a_loaded_model_learns_what_peft_learns(tmp_path: Any, quantization: Any, kind: Any) -> None:
    texts = Dataset.from_dict({"text": [f"The number after {n} is {n + 1}." for n in range(32)]})
    losses: list[list[float]] = []
    for fused in (False, True):
        torch.manual_seed(0)
        base = finetune.load_model(str(MODEL), quantization=quantization)
        if quantization == "fp8":
            assert any(isinstance(module, fp8_linear.Fp8Linear) for module in base.modules())
        model = get_peft_model(base, LoraConfig(target_modules="all-linear", **kind))
        arguments = SFTConfig(
            output_dir=str(tmp_path),
            max_steps=8,
            per_device_train_batch_size=8,
            learning_rate=0.001,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        given = finetune.speed.apply(model) if fused else model
        trainer = SFTTrainer(model=given, args=arguments, train_dataset=texts)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=5e-2)
    assert losses[1][0] - losses[1][-1] > 0.1
