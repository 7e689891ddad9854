"""Offloading on a GPU: the same loss and gradients in less memory, and AdamW that steps on the CPU."""

import time

import pytest
import torch
from conftest import metrics, receipts
from safetensors.torch import load_file
from test_offload import assert_same, batches, distance, gradients, model_of

from finetune import optimizers
from finetune.receipts import Ledger
from finetune.sections import Speed
from finetune.speed import apply, offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_inputs_that_left_and_came_back_change_nothing(kind: str, dtype: torch.dtype, compiled) -> None:
    model = model_of(kind).to("cuda", dtype)
    layers = apply.decoder_layers(model)
    plain = gradients(model)
    if compiled:
        for layer in layers:
            layer.compile()
    apply.add_recompute(model, layers, len(layers), Ledger())
    again = gradients(model)
    if not compiled:
        assert_same(plain, again)
    made = offload.Activations(layers, model.device)
    assert_same(again, gradients(model))
    assert made.out == made.back == made.pinned == 2 * len(layers)


def large(layers: int, **more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=512,
        **more,
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).bfloat16().requires_grad_(False)


def test_no_more_than_three_inputs_are_on_the_gpu_at_a_time() -> None:
    """Frozen but for the norms, so that there are no gradients to speak of; 8,192 tokens, 32 MiB an input."""
    model = large(12, max_position_embeddings=8192)
    for layer in (layers := apply.decoder_layers(model)):
        layer.input_layernorm.weight.requires_grad_(True)
    apply.add_recompute(model, layers, len(layers), Ledger())
    entry = 8192 * 2048 * 2
    ids = torch.randint(0, 512, (1, 8192), device="cuda")

    def step() -> tuple[int, int, float]:
        """Bytes after the forward and at most, and seconds."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, began = torch.cuda.memory_allocated(), time.perf_counter()
        loss = model.train()(input_ids=ids, labels=ids).loss
        kept = torch.cuda.memory_allocated() - start
        loss.backward()
        torch.cuda.synchronize()
        model.zero_grad()
        return kept, torch.cuda.max_memory_allocated() - start, time.perf_counter() - began

    step()
    plain = [step() for _ in range(5)][-1]
    made = offload.Activations(layers, model.device)
    step()
    less = [step() for _ in range(5)][-1]
    print(
        f"kept {plain[0] / 2**20:.0f} -> {less[0] / 2**20:.0f} MiB, peak {plain[1] / 2**20:.0f} ->", end=" "
    )
    print(f"{less[1] / 2**20:.0f} MiB, {plain[2] * 1e3:.1f} -> {less[2] * 1e3:.1f} ms")
    assert plain[0] - less[0] >= 10 * entry
    assert plain[1] - less[1] >= 8 * entry  # at most is in backward, where the next input is on its way
    assert made.out == made.back


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("compile", ["false", "true"])
def test_a_run_with_all_offloaded_trains_as_one_without(kind: str, compile: str, train) -> None:
    options = [f"adapter.type={kind}", "adapter.r=16", "train.max_steps=6", "train.learning_rate=1e-3"]
    options += ["data.validation=null", "train.per_device_train_batch_size=4", f"speed.compile={compile}"]
    plain = train(*options, "speed.recompute=all", name="plain")
    moved = train(*options, "speed.offload=all", name="moved")
    got = receipts(moved)
    assert "4 out, 4 back" in got["speed.offload"]["got"] and "4 pinned" in got["speed.offload"]["got"]
    assert "on the CPU" in got["speed.offload: optimizer"]["got"]
    assert metrics(plain)[0]["loss"] == metrics(moved)[0]["loss"]  # before any step
    for a, b in zip(metrics(plain), metrics(moved), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-3)


@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("epsilon", [1e-8, 1.0])
def test_adamw_on_the_cpu_moves_weights_as_the_fused_one_does(
    clip: float, epsilon: float, train, two_layers
) -> None:
    """An epsilon of 1 makes AdamW's step as long as its gradient: what is not clipped shows."""
    options = [
        "adapter.type=full",
        "train.max_steps=3",
        f"train.learning_rate={0.05 if epsilon == 1 else 1e-3}",
    ]
    options += [f"train.max_grad_norm={clip}", f"train.adam_epsilon={epsilon}", "data.validation=null"]
    options += ["train.per_device_train_batch_size=4", "speed.recompute=none", "speed.compile=false"]
    runs = [train(*options, f"speed.offload={o}", name=o) for o in ("none", "optimizer")]
    before, plain, moved = (
        load_file(path / "model.safetensors") for path in (two_layers, *(run.model for run in runs))
    )
    w0, wanted, found = (
        torch.cat([tensors[name].float().flatten() for name in plain]) for tensors in (before, plain, moved)
    )
    error = distance(found, wanted, w0)
    print(f"clip {clip:g}, epsilon {epsilon:g}: ||w - w_fused|| / ||w_fused - w0|| = {error:.2g}")
    assert error < 0.05


def optimizer_of(model):
    from trl.trainer.sft_config import SFTConfig

    arguments = SFTConfig(learning_rate=1e-3, bf16=True)
    kind, options = optimizers.kind_and_options(arguments, model, Speed(offload="optimizer"))
    return kind([p for p in model.parameters() if p.requires_grad], **options)


def test_its_state_can_be_saved_and_put_back() -> None:
    first, second = (model_of("lora").to("cuda") for _ in range(2))
    ids = batches(first, 3)

    def step(model, optimizer, batch) -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = optimizer_of(first)
    for batch in ids[:2]:
        step(first, optimizer, batch)
    second.load_state_dict(first.state_dict())
    again = optimizer_of(second)
    again.load_state_dict(optimizer.state_dict())
    for model, its in ((first, optimizer), (second, again)):
        step(model, its, ids[2])
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name
