"""The chunked loss: plain cross-entropy to 1e-10, each family's own, and TRL's run to rounding."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from finetune.adapters import trainable_parameters
from finetune.autoconfig import memory_estimate
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.quantization.fp8_linear import Fp8Linear
from finetune.speed import chunked_cross_entropy, fp8_cross_entropy, lm_head_loss
from finetune.speed.chunked_cross_entropy import Head
from support.runs import metrics, run_checks
from support.soak import soak_except
from support.trainers import FAMILIES, SIZE, given, opened, trainer_of

VOCABULARY, HIDDEN, ROWS = 37, 12, 600


def inputs_with(share: float, seed: int = 0):
    """Hidden states, a head and labels of which `share` are there, in float64."""
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, HIDDEN, generator=made, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=made, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (ROWS,), generator=made)
    labels[torch.rand(ROWS, generator=made) >= share] = -100
    return hidden, weight, labels, torch.randn(VOCABULARY, generator=made, dtype=torch.float64)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.4, 0.995, 1.0])
def test_it_is_cross_entropy(share: float, with_bias: bool, softcap: float | None, monkeypatch) -> None:
    """Value and gradient, with chunks of 256, 256 and 88 rows and with one; labels none, some and all."""
    hidden, weight, labels, bias = inputs_with(share)
    weight.requires_grad_(), bias.requires_grad_()
    logits = linear(hidden, weight, bias if with_bias else None)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = cross_entropy(logits, labels, reduction="sum")
    trained = [hidden, weight, bias] if with_bias else [hidden, weight]
    gradients = torch.autograd.grad(wanted * 0.3, trained)
    p, there = logits.softmax(-1), labels != -100
    entropy = -(p * p.log()).sum(-1)[there].sum()
    right = int((logits.argmax(-1) == labels).sum())
    for chunk_bytes in (1, 2**30):
        monkeypatch.setattr(chunked_cross_entropy, "CHUNK_BYTES", chunk_bytes)
        for count in (int(there.sum()), None):
            head = Head(weight, bias if with_bias else None, softcap)
            found = chunked_cross_entropy.token_loss(hidden, head, labels, num_labels=count)
            assert torch.allclose(found.nll, wanted, rtol=1e-10, atol=1e-10)
            for got, gradient in zip(torch.autograd.grad(found.nll * 0.3, trained), gradients, strict=True):
                assert torch.allclose(got, gradient, rtol=0, atol=1e-10)
            assert int(found.correct) == right
            if with_bias or softcap:
                assert found.entropy is None
            else:
                assert torch.allclose(found.entropy, entropy, rtol=0, atol=1e-9)
            with torch.no_grad():
                only = chunked_cross_entropy.token_loss(hidden, head, labels, num_labels=count)
            assert torch.equal(only.nll, found.nll) and only.entropy is None


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_weighted_it_is_the_weighted_cross_entropy(share: float, softcap: float | None, monkeypatch) -> None:
    """Value and all gradients; weights of 1 change no bit, and the counts of tokens have no weights."""
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_BYTES", 1)
    hidden, weight, labels, bias = inputs_with(share)
    trained = [hidden, weight.requires_grad_(), bias.requires_grad_()]
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = (cross_entropy(logits, labels, reduction="none") * weights).sum()
    head = Head(weight, bias, softcap)
    found = chunked_cross_entropy.token_loss(hidden, head, labels, weights=weights)
    assert torch.allclose(found.nll, wanted, rtol=1e-10, atol=1e-10)
    for got, gradient in zip(
        torch.autograd.grad(found.nll * 0.3, trained), torch.autograd.grad(wanted * 0.3, trained), strict=True
    ):
        assert torch.allclose(got, gradient, rtol=0, atol=1e-10)
    plain = chunked_cross_entropy.token_loss(hidden, head, labels)
    ones = chunked_cross_entropy.token_loss(hidden, head, labels, weights=torch.ones_like(weights))
    assert torch.equal(plain.nll, ones.nll) and int(found.correct) == int(plain.correct)


@pytest.mark.soak
def test_compiled_it_is_the_same() -> None:
    hidden, weight, labels, _ = inputs_with(0.6)
    plain, fused = (
        chunked_cross_entropy.token_loss(hidden, Head(weight, softcap=4.0), labels, compiled=compiled)
        for compiled in (False, True)
    )
    gradients = [torch.autograd.grad(found.nll, hidden)[0] for found in (plain, fused)]
    assert torch.allclose(plain.nll, fused.nll, rtol=1e-12) and torch.equal(plain.correct, fused.correct)
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    labels[:3] = -100  # rows with a label are never as many
    assert (
        chunked_cross_entropy.token_loss(hidden, Head(weight, softcap=4.0), labels, compiled=True).nll
        < plain.nll
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_lower_precision_it_is_no_worse_than_transformers_own(dtype: torch.dtype) -> None:
    """That one makes fp32 of the logits; the truth is the same numbers in float64."""
    exact, weight, labels, _ = inputs_with(0.7)
    weight = weight.to(dtype)
    hidden = exact.detach().to(dtype).requires_grad_()
    true = hidden.detach().double().requires_grad_()
    wanted = cross_entropy(linear(true, weight.double()), labels, reduction="sum")
    (right,) = torch.autograd.grad(wanted, true)
    plain = cross_entropy(linear(hidden, weight).float(), labels, reduction="sum")
    ours = chunked_cross_entropy.token_loss(hidden, Head(weight), labels).nll
    assert ours.dtype == torch.float32
    errors = [abs(value.item() - wanted.item()) for value in (plain, ours)]
    off = [
        float((torch.autograd.grad(value, hidden)[0] - right).norm() / right.norm())
        for value in (plain, ours)
    ]
    assert errors[1] <= 1.1 * errors[0] + 1e-6 * wanted.item() and off[1] <= 1.1 * off[0]


def test_a_head_s_bias_may_train_alone() -> None:
    hidden, weight, labels, bias = inputs_with(0.4)
    hidden, bias = hidden.detach(), bias.requires_grad_()
    wanted = cross_entropy(linear(hidden, weight, bias), labels, reduction="sum")
    got = [
        torch.autograd.grad(one, bias)[0]
        for one in (chunked_cross_entropy.token_loss(hidden, Head(weight, bias), labels).nll, wanted)
    ]
    assert torch.allclose(*got, rtol=0, atol=1e-10)


def test_what_backward_holds_is_the_gradient_and_no_logits() -> None:
    hidden, weight, labels, _ = inputs_with(0.5)
    count = int((labels != -100).sum())
    made = chunked_cross_entropy.token_loss(
        hidden, Head(weight), labels, num_labels=count
    ).nll  # torch 2.11 frees both at once
    kept = [tensor.nbytes for tensor in made.grad_fn.saved_tensors if tensor is not None]
    assert sum(kept) == count * (HIDDEN * 8 + 1 + 8)  # and which rows they are


def test_chunks_are_few_even_and_within_their_budget() -> None:
    assert memory_estimate.chunk_rows(16380, 2093) == 2048 and memory_estimate.chunk_rows(4100, 4096) == 2304
    assert (
        memory_estimate.chunk_rows(0, 4096) == 1
        and memory_estimate.chunk_rows(7, 4096) == 7
        and memory_estimate.chunk_rows(600, 0) == 256
    )


def tiny(family: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **given(family))
    made = AutoModelForCausalLM.from_config(config).double().eval()
    for name, parameter in made.named_parameters():
        if "lm_head" in name:
            parameter.requires_grad_(False)
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)  # made as zeros, it would show nothing
    made.get_output_embeddings().weight.requires_grad_(False)
    return made


@pytest.mark.parametrize("family", list(FAMILIES))
def test_on_each_family_it_is_the_model_s_own_loss(family: str) -> None:
    """And the model's logits and forward are as before, with it and after it."""
    made = tiny(family)
    assert lm_head_loss.head_unsupported_reason(made) == ""
    ids = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = labels[1, 20:] = -100
    count = int((labels[:, 1:] != -100).sum())
    plain = made(input_ids=ids, use_cache=False).logits
    # transformers casts logits to fp32 for its own: this is the same in float64
    wanted = cross_entropy(plain[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    trained = {n: p for n, p in made.named_parameters() if "layers" in n and "vision" not in n}
    right = torch.autograd.grad(wanted, list(trained.values()))
    installed = lm_head_loss.install(made, compiled=False)
    found = made(input_ids=ids, labels=labels, num_labels=count)
    got = torch.autograd.grad(found.nll, list(trained.values()))
    assert torch.allclose(found.nll, wanted, rtol=1e-12)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(got, right, strict=True))
    assert (installed.calls, installed.rows, installed.computed) == (1, 48, count)
    assert not installed.logits_kept
    assert torch.equal(made(input_ids=ids, use_cache=False).logits, plain)
    assert made.generate(ids[:, :5], max_new_tokens=2).shape == (2, 7)
    installed.undo()
    assert "forward" not in vars(made) and torch.equal(made(input_ids=ids, use_cache=False).logits, plain)


class Doubled(LlamaForCausalLM):
    """Logits of its own, of which no name in the config tells."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


def test_a_head_it_does_not_fit_is_left_to_trl() -> None:
    odd = Doubled(LlamaConfig(**SIZE)).requires_grad_(False)
    assert (
        "differ from the logits of its head (relative difference 0.5)"
        in lm_head_loss.head_unsupported_reason(odd)
    )
    nested = LlamaForCausalLM(LlamaConfig(**SIZE))
    assert not lm_head_loss.head_unsupported_reason(nested), "whether it trains or not"
    nested.lm_head = torch.nn.Sequential(nested.lm_head)
    assert "not a plain nn.Linear (Sequential)" in lm_head_loss.head_unsupported_reason(nested)
    half = LlamaForCausalLM(LlamaConfig(**SIZE)).requires_grad_(False).half()
    assert lm_head_loss.head_unsupported_reason(half) == "the output head is in float16"


ALONE = SimpleNamespace(
    router_aux_loss_coef=0.0,
    label_smoothing_factor=0,
    loss_type="nll",
    fp16=False,
)


def test_trl_s_head_is_proved_before_it_trains() -> None:
    """It, too, multiplies the backbone's hidden states with the head, whatever the model does."""
    odd = Doubled(LlamaConfig(**SIZE)).train()
    for asked in ("auto", "trl"):
        with pytest.raises(
            UserError, match=r"(?s)TRL's fused head does not compute.*difference 0\.\d"
        ) as raised:
            lm_head_loss.choose(asked, odd, ALONE)
        assert raised.value.code == 3 and "another base model" in str(raised.value)
    assert odd.training and "forward" not in vars(odd)
    capped = tiny("recurrent_gemma").float()
    torch.nn.init.normal_(capped.get_output_embeddings().weight)
    assert lm_head_loss.choose("auto", capped, ALONE).value == "chunked"
    with pytest.raises(UserError, match=r"(?s)does not compute.*loss: auto"):
        lm_head_loss.choose("trl", capped, ALONE)


def test_where_trl_s_head_is_right_it_goes_on_and_where_there_is_none_it_ends() -> None:
    projected = {"word_embed_proj_dim": 32, "ffn_dim": 64}
    opt = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **SIZE, **projected))
    chosen = lm_head_loss.choose("auto", opt, ALONE)
    assert chosen.value == "trl" and "TRL's loss equals this model's own loss" in chosen.reason
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8}
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama4_text", **SIZE, **experts))
    with pytest.raises(UserError, match=r"found: +AttributeError"):
        lm_head_loss.choose("auto", whole, ALONE)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("adapter.type=prompt_tuning", "the adapter adds virtual tokens"),
        ("model.add_tokens=['<a>']", "the output head is not a plain nn.Linear"),
        ("train.label_smoothing_factor=0.1", "label smoothing needs all logits"),
    ],
)
def test_where_it_is_not_the_run_s_loss_trl_s_is_and_an_explicit_request_ends(
    override: str, reason: str, two_layers
) -> None:
    adapted, arguments, _, _ = opened(two_layers, override)
    chosen = lm_head_loss.choose("auto", adapted, arguments)
    assert chosen.value == "trl" and reason in chosen.reason
    assert lm_head_loss.choose("trl", adapted, arguments) == ("trl", "asked for")
    with pytest.raises(UserError, match=reason) as raised:
        lm_head_loss.choose("chunked", adapted, arguments)
    assert raised.value.code == 3 and "loss: auto" in str(raised.value)


def test_experts_balance_and_fp16_are_left_to_trl(two_layers) -> None:
    adapted, arguments, _, _ = opened(two_layers)
    assert lm_head_loss.choose("auto", adapted, arguments).value == "chunked"
    arguments.fp16 = True
    assert "fp16" in lm_head_loss.choose("auto", adapted, arguments).reason
    arguments.fp16, arguments.loss_type = False, "dft"
    assert "loss_type dft" in lm_head_loss.choose("auto", adapted, arguments).reason
    arguments.loss_type = "nll"
    adapted.config.output_router_logits, adapted.config.router_aux_loss_coef = False, 0.01
    assert "the routers keep no logits" in lm_head_loss.choose("auto", adapted, arguments).reason
    arguments.router_aux_loss_coef = 0.0
    assert lm_head_loss.choose("auto", adapted, arguments).value == "chunked"


CASES = {
    "padded": ["train.per_device_train_batch_size=2", "train.neftune_noise_alpha=5"],
    "packed": ["data.packing=true", "data.max_length=256", "train.per_device_train_batch_size=4"],
    "flat": ["data.padding_free=true"],
    "full rows": ["data.train_on=all", "train.per_device_train_batch_size=1"],
    "adalora": ["adapter.type=adalora", "adapter.orth_reg_weight=5", "train.per_device_train_batch_size=4"],
}


@pytest.mark.parametrize("case", soak_except(["flat"], CASES))
def test_a_run_is_what_it_was_with_trl_s(case: str, small, two_layers, tmp_path) -> None:
    """Losses, gradient norms, weights and what is logged, over micro-batches of unequal numbers of labels."""
    logs, weights = [], []
    steps = ["train.max_steps=4" if case == "adalora" else "train.max_steps=2"]
    for chosen in ("trl", "chunked"):
        trainer = trainer_of(two_layers, tmp_path / chosen, chosen, small[0], *steps, *CASES[case])
        trainer.train()
        logs.append([line for line in trainer.state.log_history if "loss" in line])
        weights.append(
            torch.cat([p.detach().flatten() for p in trainable_parameters.trainable(trainer.model).values()])
        )
        if done := trainer.loss.installed:
            assert done.computed < done.rows or case == "full rows"
    before, after = logs
    assert len(before) == len(after) >= 2
    by_token = {"entropy", "mean_token_accuracy"} if trainer.args.gradient_accumulation_steps > 1 else set()
    for a, b in zip(before, after, strict=True):
        assert a.keys() == b.keys()
        for key in a:  # those of a step TRL averages by micro-batch, and we by token
            assert b[key] == pytest.approx(a[key], rel=3e-2 if key in by_token else 3e-5), key
    assert float((weights[0] - weights[1]).norm() / weights[0].norm()) < 1e-4


class Asked(TorchDispatchMode):
    """Operations whose answer the CPU waits for, where a device computes."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "item", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.by: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.NAMES:
            frames, frame = [], sys._getframe(1)
            while frame is not None:
                frames.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                frame = frame.f_back
            self.by.append(" < ".join(frames[:8]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["padded", "full rows", "flat"])
@pytest.mark.parametrize("chosen", ["chunked", "trl"])
def test_a_micro_batch_asks_the_device_nothing(chosen: str, case: str, small, two_layers, tmp_path) -> None:
    """But what transformers' own masks of flattened rows ask. TRL's asks for what it logs: it is seen."""
    trainer = trainer_of(two_layers, tmp_path, chosen, small[0], "model.attention=eager", *CASES[case])
    batches = iter(trainer.get_train_dataloader())
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.state.global_step = 1  # step 1 is looked at, and may be asked
    batch, items = trainer.get_batch_samples(batches, 1, trainer.args.device)
    with Asked() as asked:
        trainer.training_step(trainer.model, batch[0], items)
    ours = [by for by in asked.by if "masking_utils.py" not in by]
    assert len(asked.by) - len(ours) == (case == "flat")
    assert not ours if chosen == "chunked" else any("sft_trainer.py" in by for by in ours), ours


def test_the_collator_counts_what_the_loss_computes(small, two_layers, tmp_path) -> None:
    trainer = trainer_of(two_layers, tmp_path, "chunked", small[0], "train.per_device_train_batch_size=4")
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["num_labels"] == int((batch["labels"][:, 1:] != -100).sum()) > 0
    assert batch["num_tokens"] == int(batch["attention_mask"].sum()) < batch["input_ids"].numel()


def test_a_request_leaves_a_run_check_and_a_streamed_run_counts_for_itself(train) -> None:
    options = ["data.streaming=true", "train.max_steps=1", "data.validation=null"]
    ours, theirs = (train(f"speed.loss={name}", *options, name=name) for name in ("chunked", "trl"))
    got = run_checks(ours)["speed.loss"]
    assert got["expected"] == "chunked, 1 calls; no logits saved" and got["actual"].startswith(
        "chunked, 1 calls, "
    )
    assert run_checks(theirs)["speed.loss"]["actual"] == "trl"
    assert metrics(ours)[0]["loss"] == pytest.approx(metrics(theirs)[0]["loss"], abs=2e-6)
    assert metrics(ours)[0]["tokens"] == metrics(theirs)[0]["tokens"]


def test_a_run_check_fails_where_another_loss_ran() -> None:
    installed = lm_head_loss.Installed(lambda: None, calls=2)
    for chosen, done, operations, ok in (
        ("chunked", installed, ["_OutputHead"], True),
        ("chunked", installed, ["ChunkedLogProbFunction"], False),
        ("chunked", lm_head_loss.Installed(lambda: None, calls=1), ["_OutputHead"], False),
        ("chunked", lm_head_loss.Installed(lambda: None, calls=2, logits_kept=True), ["_OutputHead"], False),
        ("chunked_fp8", installed, ["Fp8OutputHead"], True),
        ("chunked_fp8", installed, ["_OutputHead"], False),
        ("chunked", installed, ["Fp8OutputHead"], False),
        ("trl", None, ["ChunkedLogProbFunction"], True),
        ("trl", None, [], False),
    ):
        checks, loss = RunChecks(), lm_head_loss.HeadLoss(chosen)
        loss.installed = done
        loss.add_run_check(operations, 2, checks)
        assert checks.entries[0].passed is ok


def test_auto_chooses_the_fp8_loss_on_a_wide_fp8_base_model(monkeypatch) -> None:
    """On a GPU with fp8 GEMMs: only whether they are there is answered for it."""
    wide = {**SIZE, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**{**wide, "num_hidden_layers": 1})).bfloat16()
    model.requires_grad_(False)
    assert lm_head_loss.choose("auto", model, ALONE).value == "chunked"
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Fp8Linear.of(mlp.down_proj)
    assert "compute capability 8.9" in lm_head_loss.choose("auto", model, ALONE).reason
    monkeypatch.setattr(fp8_cross_entropy, "has_gemm", lambda device: True)
    assert lm_head_loss.choose("auto", model, ALONE) == ("chunked_fp8", "auto: the base model is in fp8")
    assert lm_head_loss.choose("chunked", model, ALONE) == ("chunked", "asked for")
    model.lm_head.weight.requires_grad_()
    assert lm_head_loss.choose("auto", model, ALONE).value == "chunked"
    with pytest.raises(UserError, match="the output head trains"):
        lm_head_loss.choose("chunked_fp8", model, ALONE)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_the_fp8_loss_has_close_gradients_and_evaluates_alike(tied: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=tied)).bfloat16().requires_grad_(False)
    projection = model.model.layers[0].mlp.down_proj.weight.requires_grad_()
    ids = torch.randint(3, 96, (2, 40))
    losses, gradients, evaluated = [], [], []
    for fp8 in (False, True):
        installed = lm_head_loss.install(model, compiled=False, fp8=fp8)
        first, second = (model(input_ids=row, labels=row, num_labels=39).nll for row in ids.split(1))
        gradients.append(torch.autograd.grad(first + second, projection)[0])  # two micro-batches
        losses.append(first + second)
        with torch.no_grad():
            evaluated.append(model(input_ids=ids, labels=ids, num_labels=78).nll)
        assert installed.calls == 3 and installed.kept > 0 and not installed.logits_kept
        installed.undo()
    assert torch.allclose(*losses, rtol=1e-5) and torch.equal(*evaluated)
    difference = (gradients[1] - gradients[0]).float().norm() / gradients[0].float().norm()
    assert 0 < difference < 0.1


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_in_fp8_it_is_close_to_the_cross_entropy(share: float, weighted: bool, monkeypatch) -> None:
    """The loss is the same, and the gradient close; evaluation is bit for bit the same."""
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=made).bfloat16() / 2
    hidden = torch.randn(ROWS, 32, generator=made).bfloat16().requires_grad_()
    labels = torch.randint(64, (ROWS,), generator=made)
    labels[torch.rand(ROWS, generator=made) >= share] = -100
    weights = torch.rand(ROWS, generator=made) if weighted else None

    def result(fp8: bool) -> list[torch.Tensor]:
        loss = chunked_cross_entropy.token_loss(hidden, Head(weight, fp8=fp8), labels, weights=weights)
        assert loss.nll is not None and loss.entropy is not None
        return [loss.nll, loss.entropy, *torch.autograd.grad(loss.nll * 0.3, hidden)]

    right = result(False)
    for chunk_bytes in (1, 2**30):
        monkeypatch.setattr(fp8_cross_entropy, "CHUNK_BYTES", chunk_bytes)
        for ours, wanted, allowed in zip(result(True), right, (1e-5, 1e-2, 0.05), strict=True):
            assert (
                torch.equal(ours, wanted) if not share else (ours - wanted).norm() < allowed * wanted.norm()
            )
    with torch.no_grad():
        rounded, plain = (
            chunked_cross_entropy.token_loss(hidden, Head(weight, fp8=fp8), labels) for fp8 in (True, False)
        )
    assert rounded.nll is not None and plain.nll is not None and torch.equal(rounded.nll, plain.nll)


def test_in_fp8_no_gradient_of_a_head_is_lost() -> None:
    hidden, labels = torch.ones(4, 32).bfloat16().requires_grad_(), torch.arange(4)
    weight = torch.ones(64, 32).bfloat16()
    heads = [
        Head(torch.nn.Parameter(weight), fp8=True),
        Head(weight, torch.zeros(64), fp8=True),
        Head(weight, softcap=30.0, fp8=True),
    ]
    for head in heads:
        with pytest.raises(ValueError, match="frozen output head without bias and softcap"):
            chunked_cross_entropy.token_loss(hidden, head, labels)


def test_a_head_that_fp8_does_not_serve_says_why() -> None:
    weight = torch.zeros(64, 32, dtype=torch.bfloat16)
    reasons = [
        fp8_cross_entropy.unsupported_reason(*given[:1], bias=given[1], softcap=given[2])
        for given in (
            (weight.float(), False, None),
            (torch.nn.Parameter(weight), False, None),
            (weight, True, None),
            (weight, False, 30.0),
            (weight[:63], False, None),
            (weight, False, None),
        )
    ]
    wanted = ("float32", "trains", "bias", "softcap", "multiple of 16", "compute capability")
    assert all(word in reason for word, reason in zip(wanted, reasons, strict=True))


def test_entropy_in_fp8_of_masked_vocabulary_is_that_of_the_other_tokens() -> None:
    logits = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    logits[:, 20:] = -torch.inf
    entropy = fp8_cross_entropy.gradient_in_fp8(logits, torch.tensor([0, 1, 2, -100]))[2]
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits[:, :20]).entropy())
