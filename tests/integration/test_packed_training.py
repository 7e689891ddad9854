"""Documents in one row: apart, whole, and worth the same loss as alone."""

from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.data.packing import best_fit
from finetune.kernels.attention_functions import without_mask
from finetune.speed.packing_isolation import Leak, leaks, prove_apart, without_experts
from finetune.speed.static_shapes import fixed_shape, one_shape, tokens_of
from support.paths import MODEL
from support.plain_attention import by_document, tiny
from support.runs import metrics

APART = Leak(0.0, 0.0)


def load(attention: str = "sdpa", dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(str(MODEL), attn_implementation=attention, dtype=dtype)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", ["eval", "train", "recompute"])
def test_a_change_in_one_document_moves_nothing_in_the_other(attention: str, mode: str) -> None:
    model = load(attention)
    model.train(mode != "eval")
    if mode == "recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert leaks(model, 64) == (APART, APART)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "trap",
    [{"attention_mask": torch.ones(1, 64, dtype=torch.long)}, {"use_cache": True}],
    ids=["mask", "cache"],
)
def test_the_proof_can_fail(attention: str, trap: dict) -> None:
    """Both known traps join the documents; what looks for leaks must see it."""
    same, moved = leaks(load(attention).eval(), 64, **trap)
    assert same == APART and moved.logits > 1e-3 and moved.gradients > 1e-3


def test_a_backend_that_leaks_is_refused() -> None:
    def leaky(module, query, key, value, attention_mask, **kwargs):
        heads = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(heads, dim=1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("leaky", leaky)
    model, checks = load("leaky"), RunChecks()
    with pytest.raises(UserError, match="attend to each other with attention leaky") as raised:
        prove_apart(model, 64, "leaky", checks)
    assert raised.value.code == 3 and not checks.entries[0].passed


def test_experts_sums_go_by_how_many_tokens_they_get_which_is_no_leak() -> None:
    """In fp32 another document moves gradients in their last bits; states that run on from it are refused."""
    checks = RunChecks()
    model = tiny("mixtral", num_local_experts=4)
    model.set_attn_implementation("sdpa")
    prove_apart(model, 64, "sdpa", checks)
    assert leaks(model, 64)[1].gradients > 0
    scanning = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "num_experts": 2}
    jamba = tiny("jamba", use_mamba_kernels=False, **scanning)
    jamba.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match="attend to each other") as raised:
        prove_apart(jamba, 64, "sdpa", checks)
    assert "help:      data.packing: false" in str(raised.value)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("mixtral", {"num_local_experts": 4}), ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2})],
)
def test_without_experts_a_change_moves_nothing_and_a_leak_is_still_seen(family: str, sizes: dict) -> None:
    """On a GPU in 16 bits, the experts' sums move as much as a leak does."""
    model = tiny(family, **sizes)
    model.set_attn_implementation("sdpa")
    with without_experts(model):
        assert leaks(model, 64)[1] == APART
        joined = leaks(model, 64, attention_mask=torch.ones(1, 64, dtype=torch.long))[1]
    assert joined.logits > 1e-4 and joined.gradients > 1e-4
    assert leaks(model, 64)[1].gradients > 0  # the experts run again


def documents(count: int = 12) -> list[dict[str, list[int]]]:
    made = torch.Generator().manual_seed(1)
    rows = []
    for length in torch.randint(3, 40, (count,), generator=made).tolist():
        ids = torch.randint(5, 900, (length,), generator=made).tolist()
        labels = [-100] * (length // 2) + ids[length // 2 :]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def packed(rows: list[dict[str, list[int]]], budget: int = 64) -> list[dict[str, list[int]]]:
    groups = best_fit([len(row["input_ids"]) for row in rows], budget)
    return [
        {
            "input_ids": [i for index in group for i in rows[index]["input_ids"]],
            "labels": [i for index in group for i in rows[index]["labels"]],
            "seq_lengths": [len(rows[index]["input_ids"]) for index in group],
        }
        for group in groups
    ]


def loss_of(model, batch: dict) -> tuple[torch.Tensor, int]:
    """Sum of the token losses, and how many there are."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    chosen = targets != -100
    loss = torch.nn.functional.cross_entropy(logits[chosen], targets[chosen], reduction="sum")
    return loss, int(chosen.sum())


@pytest.mark.parametrize(
    ("attention", "tolerance"),
    [("sdpa", 1e-12), ("eager", 1e-7)],  # transformers' eager softmax is in fp32 whatever the model is in
)
def test_packed_loss_and_gradients_are_the_sums_of_unpacked_ones(attention: str, tolerance: float) -> None:
    model, rows = load(attention, torch.float64), documents()
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    whole, count = loss_of(model, collate(packed(rows)))
    whole.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    alone = [loss_of(model, {name: torch.tensor([ids]) for name, ids in row.items()}) for row in rows]
    total = torch.stack([loss for loss, _ in alone]).sum()
    total.backward()
    assert count == sum(n for _, n in alone)
    assert abs(whole.item() - total.item()) / total.item() < tolerance
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert (gradient - parameter.grad).norm() <= 10 * tolerance * (1 + parameter.grad.norm())


def test_a_batch_of_one_shape_has_the_same_loss() -> None:
    model, rows = load(dtype=torch.float64), packed(documents())
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    count = sum(len(row["seq_lengths"]) for row in rows)
    full = fixed_shape(batch, 64 * len(rows), count + 5, 64)
    assert (
        full["input_ids"].shape == full["position_ids"].shape == full["seq_idx"].shape == (1, 64 * len(rows))
    )
    assert full["cu_seq_lens_q"].shape == (count + 6,) and full["cu_seq_lens_q"][-1] == 64 * len(rows)
    assert (full["cu_seq_lens_q"].diff() >= 0).all() and full["max_length_q"] == 64
    one, other = loss_of(model, batch), loss_of(model, full)
    assert one[1] == other[1] and abs(one[0].item() - other[0].item()) / one[0].item() < 1e-12


class UpTo(torch.autograd.Function):
    """A kernel's output, or a gradient of it, of at most `longest` tokens a document: no other is written."""

    @staticmethod
    def forward(ctx, tensor, borders, longest):
        at = torch.arange(tensor.shape[1])
        place = at - borders[torch.searchsorted(borders, at, right=True) - 1]
        ctx.unwritten = (place >= longest)[:, None, None]
        return tensor.masked_fill(ctx.unwritten, torch.nan)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.masked_fill(ctx.unwritten, torch.nan), None, None


def up_to_the_longest(query, key, value, *, borders, longest, **settings):
    given = [UpTo.apply(tensor, borders, longest) for tensor in (query, key, value)]
    return UpTo.apply(by_document(*given, borders=borders, longest=longest, **settings), borders, longest)


def test_a_batch_end_to_end_has_a_number_of_tokens_that_all_products_take() -> None:
    assert [tokens_of((1000, 9, 250), parts) for parts in (1, 3, 4, 8)] == [1008, 336, 256, 256]
    assert [tokens_of((16384, 9, 512), parts) for parts in (1, 2, 32)] == [16384, 8192, 512]


@pytest.mark.parametrize("filled", [1, 3, 4])
def test_what_fills_a_batch_up_is_in_no_document_longer_than_the_longest(filled: int) -> None:
    """A row that a kernel has not written has its part in the gradients of all that is multiplied by it."""
    AttentionInterface.register("up_to_the_longest", without_mask(up_to_the_longest))
    model, rows = load("up_to_the_longest", torch.float64), packed(documents(20))
    where = [row["seq_lengths"] for row in rows]
    shape = one_shape(4, where, 64)
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows[:filled])
    full = fixed_shape(batch, *shape)
    assert full["cu_seq_lens_q"].shape == (4 * max(map(len, where)) + 5 + 1,)
    assert full["cu_seq_lens_q"].diff().max() <= 64 and full["seq_idx"].dtype == batch["seq_idx"].dtype
    assert (full["position_ids"][0, full["cu_seq_lens_q"][:-1].unique()[:-1]] == 0).all()
    gradients = []
    for inputs in (batch, full):
        loss, _ = loss_of(model, inputs)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 1e-11 * (1 + one.norm())


def test_a_step_on_packed_rows_is_a_step_on_the_same_documents(train, small, tmp_path) -> None:
    """All 32 documents in one step: padded, flattened and packed."""
    documents = Path(small[0].partition("=")[2]).read_text().splitlines()[:32]
    (tmp_path / "rows.jsonl").write_text("\n".join(documents) + "\n")
    one = ["train.max_steps=1", "train.logging_steps=1", "data.validation=null"]
    one.append(f"data.name={tmp_path / 'rows.jsonl'}")
    padded = train(*one, "train.effective_batch_size=32", name="padded")
    flat = train(*one, "train.effective_batch_size=32", "data.padding_free=true", name="flat")
    rows = 8
    dense = [*one, f"train.effective_batch_size={rows}", "data.packing=true", "data.max_length=512"]
    dense = train(*dense, name="packed")
    report = dense.read("data_report.json")["train"]
    assert report["packing"]["rows"] == rows and report["kept"] == 32
    for other in (flat, dense):
        assert metrics(other)[0]["loss"] == pytest.approx(metrics(padded)[0]["loss"], rel=1e-5)
        assert metrics(other)[0]["grad_norm"] == pytest.approx(metrics(padded)[0]["grad_norm"], rel=1e-3)
        run_checks = {check["option"]: check for check in other.read("checks.json")}
        assert all(check["passed"] for check in run_checks.values())
        assert run_checks["packed examples isolated"]["actual"] == "changes logits by 0, gradients by 0"


def test_too_few_packed_rows_for_a_step_say_so(train, capsys) -> None:
    train("data.packing=true", "data.max_length=1024", "train.effective_batch_size=64", code=2)
    assert "one step needs 64 sequences, and the training data has" in capsys.readouterr().err


def test_similar_lengths_together(train) -> None:
    run = train("train.train_sampling_strategy=group_by_length", "data.validation=null")
    assert len(metrics(run)) == 2


def test_trl_s_names_for_packing_lead_to_ours(recipe_file, capsys) -> None:
    text = "model: {name: '{model}'}\ndata: {name: '{data}'}\nadapter: {type: lora}\ntrain: {packing: true}\n"
    assert main.main(["check", str(recipe_file(text))]) == 2
    assert "data.packing" in capsys.readouterr().err
