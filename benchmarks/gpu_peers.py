"""Measure the peers of `finetune train` for gpu.py, set up as their documentation shows.

The name of a row lists the enabled options, such as `trl-dora+liger+checkpointing`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu import Job


def train(job: Job, targets: str | list[str] = "all-linear") -> tuple[list[float], float, float, str]:
    """Train the row of a peer. `targets` are the modules with an adapter.

    Returns:
        Seconds of each step, the last loss, the allocator's peak in GiB, the attention that was set.
    """
    words = set(re.split("[-+]", job.name))
    model, tokenizer, config = unsloth(job, words) if "unsloth" in words else trl(job, words, targets)
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [json.loads(line)["text"] for line in job.data.read_text().splitlines()]
    ids = [i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    rows = [ids[i : i + job.length] for i in range(0, len(ids) - job.length, job.length)]
    halves = 2 if "dora" in words else 1  # PEFT's DoRA does not fit with a micro-batch size of 4
    recompute = "checkpointing" in words or "dora" in words
    # Unsloth's activation checkpointing is part of its model, so SFTConfig keeps its default
    checkpointing = {} if recompute and "unsloth" in words else {"gradient_checkpointing": recompute}
    arguments = SFTConfig(
        output_dir=str(job.out / "runs" / job.name), max_steps=job.steps,
        learning_rate=1e-5 if "full" in words else 1e-4, max_length=job.length, logging_steps=1,
        per_device_train_batch_size=job.batch // halves, gradient_accumulation_steps=halves,
        bf16=torch.cuda.is_available(), save_strategy="no", report_to="none",
        use_liger_kernel="liger" in words, **checkpointing,
    )  # fmt: skip
    clock = make_clock()
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows[: job.steps * job.batch]}),
        processing_class=tokenizer,
        peft_config=config,
        callbacks=[clock],
    )
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30
    return clock.seconds, clock.loss, peak, model.config._attn_implementation


def trl(job: Job, words: set[str], targets: str | list[str]) -> tuple[Any, Any, Any]:
    """Return the model, the tokenizer and PEFT's config, which is `None` for full fine-tuning."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": torch.float32 if "fp32" in words else torch.bfloat16}
    if torch.cuda.is_available():
        options["device_map"] = {"": 0}
    if "qlora" in words:
        settings: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        settings["bnb_4bit_compute_dtype"] = torch.bfloat16
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **settings)
    model = AutoModelForCausalLM.from_pretrained(job.model, **options)
    config = LoraConfig(r=16, lora_alpha=32, target_modules=targets, use_dora="dora" in words)
    return model, AutoTokenizer.from_pretrained(job.model), None if "full" in words else config


def unsloth(job: Job, words: set[str]) -> tuple[Any, Any, None]:
    """Return Unsloth's model with its adapter, and the tokenizer."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # they would need the network
    try:
        from unsloth import FastLanguageModel  # before TRL and transformers, which it changes
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed")
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(job.model), max_seq_length=job.length, load_in_4bit="qlora" in words
    )
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    checkpointing = "unsloth" if "checkpointing" in words else False
    settings: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0, "bias": "none"}
    settings |= {"target_modules": linear, "use_gradient_checkpointing": checkpointing}
    return FastLanguageModel.get_peft_model(model, **settings), tokenizer, None


def make_clock() -> Any:
    """Return a callback that stores the seconds of each step and the last loss. As in `finetune train`, a
    step lasts from one logged loss to the next, and reading the loss waits for the device."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.loss = float("nan")

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.logged = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                now = time.perf_counter()
                self.seconds.append(now - self.logged)
                self.logged, self.loss = now, logs["loss"]

    return Clock()
