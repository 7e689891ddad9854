"""The loss on a GPU: bf16 against float64, no question to the device in a micro-batch, memory, TRL's run."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from finetune.autoconfig import memory_estimate
from finetune.speed import chunked_cross_entropy, fp8_cross_entropy
from finetune.speed.chunked_cross_entropy import Head
from support.kernel_steps import error
from support.runs import metrics, run_checks
from support.soak import soak_except
from support.trainers import trainer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # torch says so of its own set_sync_debug_mode (torch/csrc/cuda/Module.cpp)
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

if torch.cuda.is_available():
    from finetune.kernels import triton_loss

ROWS, HIDDEN, VOCABULARY = 3000, 1024, 32003  # a vocabulary that no tile divides


def inputs_with(share: float):
    made = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=made, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=made, device="cuda") / 8).bfloat16()
    labels = torch.randint(VOCABULARY, (ROWS,), generator=made, device="cuda")
    labels[torch.rand(ROWS, generator=made, device="cuda") >= share] = -100
    return hidden, weight, labels


@pytest.fixture
def sums_in_fp32() -> Iterator[None]:
    """Without it, cuBLAS adds parts of a long sum in bf16 for some numbers of rows and not for others."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("vocabulary", [32000, 151936])
def test_in_fp8_it_is_close_and_equals_the_cpu(share: float, vocabulary: int) -> None:
    hidden, _, labels = inputs_with(share)
    labels = torch.where(labels >= vocabulary, vocabulary - 1, labels)
    made = torch.Generator("cuda").manual_seed(1)
    weight = (torch.randn(vocabulary, HIDDEN, generator=made, device="cuda") / 8).bfloat16()

    def result(fp8: bool) -> list[torch.Tensor]:
        loss = chunked_cross_entropy.token_loss(hidden, Head(weight, fp8=fp8), labels)
        return [loss.nll, loss.entropy, *torch.autograd.grad(loss.nll * 0.3, hidden)]

    ours, wanted = result(True), result(False)
    if share:
        assert error(ours[0], wanted[0]) < 1e-5 and error(ours[1], wanted[1]) < 1e-3
        assert error(ours[2], wanted[2]) < 0.06
    else:
        assert all(not one.any() for one in ours)
    logits = (hidden[:100].detach() @ weight.T).bfloat16()
    there = triton_loss.gradient_in_fp8(logits, labels[:100])
    here = fp8_cross_entropy.gradient_in_fp8(logits.cpu(), labels[:100].cpu())
    assert torch.equal(there[1].cpu(), here[1])
    kept = labels[:100] != -100
    for place in (0, 2, 3, 4):
        if kept.any():
            assert error(there[place][kept].float(), here[place][kept.cpu()].float()) < 3e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_in_bf16_it_is_no_worse_than_transformers_own(
    share: float, softcap, compiled, monkeypatch, sums_in_fp32
) -> None:
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_BYTES", VOCABULARY * 6 * 700)
    hidden, weight, labels = inputs_with(share)

    def plain(h, w, dtype):
        logits = linear(h, w).to(dtype)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return cross_entropy(logits, labels, reduction="sum")

    true = hidden.detach().double().requires_grad_()
    wanted, usual = plain(true, weight.double(), torch.float64), plain(hidden, weight, torch.float32)
    ours = chunked_cross_entropy.token_loss(
        hidden, Head(weight, softcap=softcap), labels, compiled=compiled
    ).nll
    (right,) = torch.autograd.grad(wanted, true)
    off = [torch.autograd.grad(value, hidden)[0].double() - right for value in (usual, ours)]
    assert abs(ours.item() - wanted.item()) <= 1.5 * abs(usual.item() - wanted.item()) + 1e-5 * wanted.item()
    assert off[1].norm() <= 1.1 * off[0].norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_it_asks_the_device_nothing(share: float, compiled: bool) -> None:
    hidden, weight, labels = inputs_with(share)
    count = int((labels != -100).sum())
    given = {"num_labels": count, "compiled": compiled}
    chunked_cross_entropy.token_loss(hidden, Head(weight), labels, **given).nll.backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunked_cross_entropy.token_loss(hidden, Head(weight), labels, **given).nll.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", ["padded", "full rows"])
def test_a_micro_batch_asks_the_device_nothing(rows: str, small, two_layers, tmp_path) -> None:
    """Of the Trainer: forward, loss, backward, what is logged. The mask is given as the layers want it, for
    transformers' own way there asks whether any token is padding; so no kernel that takes none."""
    options = ["model.attention=sdpa", "train.per_device_train_batch_size=2"]
    if rows == "full rows":
        options = ["model.attention=sdpa", "data.train_on=all", "train.per_device_train_batch_size=1"]
    trainer = trainer_of(two_layers, tmp_path, "chunked", small[0], *options)
    wrapped = trainer.accelerator.prepare_model(trainer.model)
    batches = iter(trainer.get_train_dataloader())
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.state.global_step = 1
    for number in range(2):
        (batch,), items = trainer.get_batch_samples(batches, 1, trainer.args.device)
        there = batch["attention_mask"].bool()
        causal = torch.ones(2 * there.shape[-1:], dtype=torch.bool, device="cuda").tril()
        batch["attention_mask"] = there[:, None, None, :] & causal
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(
            "error" if number else "default"
        )  # the first makes handles and buffers
        try:
            trainer.training_step(wrapped, batch, items)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert trainer.sums["correct"].is_cuda and trainer.sums["tokens"] > 0


def test_it_holds_chunks_and_the_gradient_of_hidden_states() -> None:
    rows, hidden_size, vocabulary = 8192, 2048, 128256
    hidden = torch.randn(rows, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, device="cuda", dtype=torch.bfloat16) / 50
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    torch.mm(hidden[:256].detach(), weight.T)  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = chunked_cross_entropy.token_loss(hidden, Head(weight), labels, num_labels=rows)
    peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    gradient = rows * hidden_size * 2
    assert (
        kept < 1.1 * gradient + 2**20
        and peak < memory_estimate.CHUNK_BYTES + gradient + 0.3 * memory_estimate.CHUNK_BYTES
    )
    found.nll.backward()


@pytest.mark.parametrize(
    "options",
    soak_except([["speed.compile=true"]], [[], ["speed.compile=true"], ["data.packing=true"]]),
    ids=str,
)
def test_a_run_follows_trl_s(options: list[str], train) -> None:
    runs = [
        train("train.max_steps=6", f"speed.loss={name}", *options, name=name) for name in ("trl", "chunked")
    ]
    assert run_checks(runs[1])["speed.loss"]["actual"].startswith("chunked")
    for a, b in zip(*map(metrics, runs), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.01)


def test_a_step_that_is_not_finite_ends_the_run_on_a_gpu_too(train, capsys) -> None:
    run = train("train.learning_rate=1e30", "train.max_steps=6", "train.logging_steps=100", code=5)
    assert "NaN or Inf" in capsys.readouterr().err and not run.adapter.exists()


@pytest.mark.parametrize("vocabulary", [99, 8192, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_makes_the_loss_and_its_gradient(vocabulary: int, dtype: torch.dtype) -> None:
    """Also of a row without a label, of ties, and of logits that are far apart."""
    torch.manual_seed(0)
    logits, labels = (torch.randn(70, vocabulary) * 5).to(dtype), torch.randint(vocabulary, (70,))
    labels[2], labels[3], labels[4] = -100, logits[3].argmax(), 0
    logits[4], logits[5] = 0.0, -1e4
    logits[5, 3] = 1e4
    exact = logits.double()
    wanted, right = chunked_cross_entropy.softmax_in_place(exact, labels, None, torch.float64, True)
    for differentiate in (False, True):
        made = logits.cuda()
        nll, correct = chunked_cross_entropy.triton_loss.softmax_in_place(made, labels.cuda(), differentiate)
        assert torch.allclose(nll.cpu().double(), wanted, atol=1e-4)
        assert torch.equal(correct.cpu(), right)
        assert error(made, exact if differentiate else logits) < (1e-6 if dtype == torch.float32 else 3e-3)
    made[1, 5] = float("nan")
    assert (
        chunked_cross_entropy.triton_loss.softmax_in_place(made, labels.cuda(), True)[0]
        .isnan()
        .tolist()
        .count(True)
        == 1
    )
