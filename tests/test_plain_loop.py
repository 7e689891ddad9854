"""The whole trainer beside thirty lines of PyTorch: batches in, weights out."""

from __future__ import annotations

from typing import Any

import torch
from conftest import QUICKSTART, metrics
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, TrainerCallback, get_cosine_schedule_with_warmup

from finetune import recipe
from finetune import train as training

STEPS, WARM, RATE, CLIP, DECAY = 12, 3, 5e-3, 0.1, 0.1


class Recorder(TrainerCallback):
    """First weights, and each micro-batch, as the model got them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        self.first = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        model.register_forward_pre_hook(self.record, with_kwargs=True)

    def record(self, module: Any, args: Any, given: dict[str, Any]) -> None:
        if module.training:
            self.batches.append({n: given[n].clone() for n in ("input_ids", "attention_mask", "labels")})


def plain(base: str, first: dict[str, Any], batches: list[dict[str, Any]], accumulation: int) -> Any:
    """Cross-entropy over a step's labels, clipping, AdamW, warm-up and cosine; the losses and the model."""
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == first.keys()
    for name, parameter in trained.items():
        parameter.data.copy_(first[name])
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=DECAY)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARM, STEPS)
    losses = []
    for start in range(0, len(batches), accumulation):
        step = batches[start : start + accumulation]
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)
        total = 0.0
        for batch in step:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].flatten(0, 1)
            loss = cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum") / labels
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, trained


def test_twelve_steps_are_those_of_a_plain_loop(small, two_layers, tmp_path) -> None:
    given = [*small, f"model.name={two_layers}", f"train.max_steps={STEPS}", f"train.warmup_steps={WARM}"]
    given += ["adapter.type=lora", "adapter.r=4", "adapter.lora_alpha=8", f"train.learning_rate={RATE}"]
    given += ["train.lr_scheduler_type=cosine", f"train.max_grad_norm={CLIP}", f"train.weight_decay={DECAY}"]
    given += ["train.effective_batch_size=8", "train.per_device_train_batch_size=4", "train.logging_steps=1"]
    given += ["eval.general=false", "eval.max_new_tokens=1", f"train.output_dir={tmp_path / 'run'}"]
    recorder = Recorder()
    run = training.run(recipe.load(QUICKSTART, given), quiet=True, watchers=[recorder])
    assert len(recorder.batches) == 2 * STEPS
    losses, trained = plain(str(two_layers), recorder.first, recorder.batches, 2)
    ours = metrics(run)
    assert sum(line["grad_norm"] > CLIP for line in ours) > 2, "clipping had something to do"
    for line, loss in zip(ours, losses, strict=True):
        assert abs(line["loss"] - loss) < 2e-5 * loss
    saved = load_file(run.adapter / "adapter_model.safetensors")
    for name, parameter in trained.items():
        moved = (parameter - recorder.first[name]).norm()
        assert (saved[name.replace(".default", "")] - parameter).norm() < 1e-3 * moved, name
