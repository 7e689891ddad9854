"""The whole trainer beside thirty lines of PyTorch, and beside transformers' own: batches in, weights out."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)
from transformers import Trainer as HfTrainer

from finetune.data.loss_mask import IGNORED
from finetune.recipe import loader
from finetune.speed.chunked_cross_entropy import Head, token_loss
from finetune.training import pipeline
from support.paths import QUICKSTART
from support.runs import metrics

STEPS, WARM, RATE, CLIP, DECAY = 20, 3, 5e-3, 0.1, 0.1


class Recorder(TrainerCallback):
    """First weights, and each micro-batch, as the model got them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        self.first = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        model.register_forward_pre_hook(self.record, with_kwargs=True)

    def record(self, module: Any, args: Any, given: dict[str, Any]) -> None:
        if module.training:
            self.batches.append({n: given[n].clone() for n in ("input_ids", "attention_mask", "labels")})


def plain_model(base: str, first: dict[str, Any]) -> Any:
    """The model under an adapter by PEFT, with the first weights; and what trains of it."""
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == first.keys()
    for name, parameter in trained.items():
        parameter.data.copy_(first[name])
    return model, trained


def textbook(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The sum of cross-entropy over labels."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def in_chunks(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The same number by our loss."""
    backbone, head = model.get_base_model().base_model, model.get_output_embeddings()
    hidden = backbone(batch["input_ids"], batch["attention_mask"], use_cache=False).last_hidden_state
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    nll = token_loss(hidden, Head(head.weight), labels, num_labels=int((labels != IGNORED).sum())).nll
    assert nll is not None
    return nll


def plain(model: Any, trained: Any, batches: list[dict[str, Any]], accumulation: int, summed: Any) -> Any:
    """The loss over a step's labels, clipping, AdamW, warm-up and cosine; the losses."""
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=DECAY, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARM, STEPS)
    losses = []
    for start in range(0, len(batches), accumulation):
        step = batches[start : start + accumulation]
        labels = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in step)
        total = torch.zeros(())
        for batch in step:
            loss = summed(model, batch) / labels
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def upstream(model: Any, batches: list[dict[str, Any]], accumulation: int, folder: Any) -> list[float]:
    """The losses of transformers' Trainer and the model's own loss, on these batches."""
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=1, gradient_accumulation_steps=accumulation, max_steps=STEPS,
        learning_rate=RATE, weight_decay=DECAY, max_grad_norm=CLIP, warmup_steps=WARM, logging_steps=1,
        lr_scheduler_type="cosine", train_sampling_strategy="sequential", remove_unused_columns=False,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    rows: Any = batches
    trainer = HfTrainer(model, arguments, train_dataset=rows, data_collator=lambda items: items[0])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_twenty_steps_are_those_of_a_plain_loop(small, two_layers, tmp_path) -> None:
    given = [*small, f"model.name={two_layers}", f"train.max_steps={STEPS}", f"train.warmup_steps={WARM}"]
    given += ["adapter.type=lora", "adapter.r=4", "adapter.lora_alpha=8", f"train.learning_rate={RATE}"]
    given += ["train.lr_scheduler_type=cosine", f"train.max_grad_norm={CLIP}", f"train.weight_decay={DECAY}"]
    given += ["train.effective_batch_size=4", "train.per_device_train_batch_size=2", "train.logging_steps=1"]
    given += ["eval.forgetting=false", "eval.max_new_tokens=1", f"train.output_dir={tmp_path / 'run'}"]
    recorder = Recorder()
    run = pipeline.run(loader.load(QUICKSTART, given), verbosity="quiet", callbacks=[recorder])
    assert len(recorder.batches) == 2 * STEPS
    ours, saved = metrics(run), load_file(run.adapter / "adapter_model.safetensors")
    assert sum(line["grad_norm"] > CLIP for line in ours) > 2, "clipping had something to do"

    model, trained = plain_model(str(two_layers), recorder.first)
    assert [line["loss"] for line in ours] == plain(model, trained, recorder.batches, 2, in_chunks)
    assert all(torch.equal(saved[name.replace(".default", "")], p) for name, p in trained.items())

    for other in ("textbook", "transformers"):
        model, trained = plain_model(str(two_layers), recorder.first)
        if other == "textbook":
            losses = plain(model, trained, recorder.batches, 2, textbook)
        else:
            losses = upstream(model, recorder.batches, 2, tmp_path / "upstream")
        for line, loss in zip(ours, losses, strict=True):
            assert abs(line["loss"] - loss) < 1e-6 * loss, other
        for name, parameter in trained.items():
            moved = (parameter - recorder.first[name]).norm()
            assert (saved[name.replace(".default", "")] - parameter).norm() < 1e-3 * moved, (other, name)
