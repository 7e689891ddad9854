"""`finetune.load_model` in somebody else's training: transformers' Trainer and a loop of its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import finetune
from finetune.core.errors import UserError
from support.paths import MODEL

EXAMPLES = [{"input_ids": list(range(i, i + 12)), "labels": list(range(i, i + 12))} for i in range(1, 17)]


def trained(model: Any, folder: Any) -> list[float]:
    """Losses of a few steps of transformers' Trainer, all on the same examples."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=5,
        per_device_train_batch_size=16,
        learning_rate=0.01,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Dataset.from_list(EXAMPLES))
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_load_model_trains_an_adapter_under_the_trainer(tmp_path: Any, quantization: Any) -> None:
    model = finetune.load_model(str(MODEL), quantization=quantization)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    stored = {type(module).__name__ for module in model.modules()}
    expected = {"none": "Linear", "nf4": "Linear4bit", "int8": "Linear8bitLt"}
    assert expected[quantization] in stored
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    losses = trained(adapted, tmp_path)
    assert losses[-1] < losses[0] - 0.05
    adapted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_load_model_without_quantization_is_the_model_of_transformers() -> None:
    ids = torch.arange(12).unsqueeze(0)
    own: Any = finetune.load_model(str(MODEL))
    upstream = AutoModelForCausalLM.from_pretrained(MODEL, dtype=own.dtype)
    assert torch.equal(own(ids).logits, upstream(ids).logits)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no/such/folder/here", {}, "model.name"),
        (str(MODEL), {"quantization": "fp9"}, "quantization"),
        (str(MODEL), {"quantization": "fp8"}, "no fp8 GEMMs"),
        (str(MODEL), {"revision": "main"}, "a model in a local folder has no revisions"),
    ],
)
def test_load_model_raises_user_errors(name: str, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        finetune.load_model(name, **options)


def test_load_model_from_several_threads_loads_whole_models() -> None:
    """transformers patches torch.nn.init while it loads a model, so finetune loads one model at a time."""
    together, initialize = threading.Barrier(4), torch.nn.init.kaiming_uniform_

    def load(_: int) -> Any:
        together.wait()
        return finetune.load_model(str(MODEL))

    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(load, range(4)))
    expected = models[0].state_dict()
    for model in models[1:]:
        found = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert torch.nn.init.kaiming_uniform_ is initialize and torch.get_default_dtype() == torch.float32
