"""Offloading on a GPU: the same loss and gradients in less memory, and AdamW that steps on the CPU."""

import copy
import re
import time
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from finetune.core.run_checks import RunChecks
from finetune.recipe.schema import Speed
from finetune.speed import activation_offload, apply_to_model, live_model_spec
from finetune.training import optimizers
from support.offloading import assert_same, batches, distance, gradients, model_of
from support.runs import metrics, run_checks
from support.soak import soak_except

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


DTYPES = [torch.float32, torch.bfloat16]
OFTEN = [*product(["lora", "full"], DTYPES, [False]), ("lora", torch.bfloat16, True)]


@pytest.mark.parametrize(
    ("kind", "dtype", "compiled"), soak_except(OFTEN, product(["lora", "full"], DTYPES, [False, True]))
)
def test_inputs_that_left_and_came_back_change_nothing(kind: str, dtype: torch.dtype, compiled) -> None:
    model = model_of(kind).to("cuda", dtype)
    layers = live_model_spec.decoder_layers(model)
    plain = gradients(model)
    if compiled:
        for layer in layers:
            layer.compile()
    apply_to_model.add_activation_checkpointing(model, layers, len(layers), RunChecks())
    again = gradients(model)
    if not compiled:
        assert_same(plain, again)
    made = activation_offload.Activations(layers, model.device)
    assert_same(again, gradients(model))
    assert made.out == made.back == made.pinned == 2 * len(layers)


def large(layers: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=8192,
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).bfloat16().requires_grad_(False)


def test_no_more_than_three_inputs_are_on_the_gpu_at_a_time() -> None:
    """Frozen but for the norms, so that there are no gradients to speak of; 8,192 tokens, 32 MiB an input.

    Two are on their way after the forward, and autograd holds the first: a leaf, whose gradient transformers
    asks for.
    """
    model = large(12)
    for layer in (layers := live_model_spec.decoder_layers(model)):
        layer.input_layernorm.weight.requires_grad_(True)
    apply_to_model.add_activation_checkpointing(model, layers, len(layers), RunChecks())
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
    made = activation_offload.Activations(layers, model.device)
    step()
    less = [step() for _ in range(5)][-1]
    print(
        f"kept {plain[0] / 2**20:.0f} -> {less[0] / 2**20:.0f} MiB, peak {plain[1] / 2**20:.0f} ->", end=" "
    )
    print(f"{less[1] / 2**20:.0f} MiB, {plain[2] * 1e3:.1f} -> {less[2] * 1e3:.1f} ms")
    assert plain[0] - less[0] >= 9 * entry
    assert plain[1] - less[1] >= 8 * entry  # at most is in backward, where the next input is on its way
    assert made.out == made.back


@pytest.mark.parametrize(
    ("kind", "compile"),
    soak_except(
        [("lora", "false"), ("full", "true")], [("lora", "false"), ("full", "false"), ("full", "true")]
    ),
)
def test_a_run_with_all_offloaded_trains_as_one_without(kind: str, compile: str, train) -> None:
    options = [f"adapter.type={kind}", "adapter.r=16", "train.max_steps=6", "train.learning_rate=1e-3"]
    options += ["data.validation=null", "train.per_device_train_batch_size=4", f"speed.compile={compile}"]
    options.append("train.effective_batch_size=8")  # two layers, two micro-batches
    options += ["train.warmup_steps=2", "train.logging_steps=1"]
    plain = train(*options, "speed.activation_checkpointing=full", name="plain")
    torch.compiler.reset()  # what it compiled for the model before would serve this one, without its hooks
    moved = train(*options, "speed.offload=all", name="moved")
    got = run_checks(moved)
    tensors = re.fullmatch(
        r"4 out, 4 back: (\d+) tensors, .* MiB, (\d+) pinned", got["speed.offload"]["actual"]
    )
    assert tensors and tensors[1] == tensors[2]
    assert "on the CPU" in got["speed.offload: optimizer"]["actual"]
    assert metrics(plain)[0]["loss"] == metrics(moved)[0]["loss"]  # before any step
    for a, b in zip(metrics(plain), metrics(moved), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-3)


def optimizer_of(model, where: str, epsilon: float = 1e-8):
    from trl.trainer.sft_config import SFTConfig

    arguments = SFTConfig(learning_rate=1e-3, adam_epsilon=epsilon, bf16=True)
    kind, options = optimizers.kind_and_options(arguments, model, Speed(offload=where))
    return kind([p for p in model.parameters() if p.requires_grad], weight_decay=0.01, **options)


def step(model, optimizer, ids: torch.Tensor, clip: float = 0.0) -> None:
    """Two micro-batches and an optimizer step, as the Trainer makes it."""
    for part in ids.chunk(2):
        model(input_ids=part, labels=part).loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    if hasattr(optimizer, "param_d2h_map"):
        arguments = SimpleNamespace(max_grad_norm=clip)
        optimizers.SendGradients().on_pre_optimizer_step(arguments, None, None, optimizer=optimizer)
    optimizer.step()
    model.zero_grad()


@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("epsilon", [1e-8, 1.0])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_adamw_on_the_cpu_moves_weights_as_the_fused_one_does(kind: str, epsilon: float, clip: float) -> None:
    """An epsilon of 1 makes AdamW's step as long as its gradient: what is not clipped shows, by a factor.

    Measured on an H200: at most 3.1e-6; with an epsilon of 1, where a step is some 1e-8 a weight and fp32
    rounds the weights themselves, 4e-4, clipped 3.3e-3.
    """
    trained = []
    for where in ("none", "optimizer"):
        model = model_of(kind).to("cuda")
        parameters = [p for p in model.parameters() if p.requires_grad]
        before = torch.cat([p.detach().flatten() for p in parameters])
        optimizer = optimizer_of(model, where, epsilon)
        for ids in batches(model, 10):
            step(model, optimizer, ids, clip)
        trained.append(torch.cat([p.detach().flatten() for p in parameters]))
    error = distance(trained[1], trained[0], before)
    print(f"{kind}, clip {clip:g}, epsilon {epsilon:g}: ||w - w_fused|| / ||w_fused - w0|| = {error:.2g}")
    assert error < (1e-5 if epsilon < 1 else 1e-2)


def test_its_state_can_be_saved_and_put_back() -> None:
    first, second = (model_of("lora").to("cuda") for _ in range(2))
    ids = batches(first, 3)
    optimizer = optimizer_of(first, "optimizer")
    for batch in ids[:2]:
        step(first, optimizer, batch)
    second.load_state_dict(first.state_dict())
    again = optimizer_of(second, "optimizer")
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, its in ((first, optimizer), (second, again)):
        step(model, its, ids[2])
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name
