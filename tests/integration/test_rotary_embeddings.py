"""Rotary embeddings whose frequencies depend on the longest sequence of a batch: `dynamic` and `longrope`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.data.encoding import Encoded
from finetune.evaluation import scoring
from finetune.models import rotary_embeddings, token_limits
from support import tiny_models
from support.paths import MODEL
from support.runs import metrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from finetune.run_folder.run_folder import RunFolder

ORIGINAL = 40  # tokens
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 16.0]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": ORIGINAL,
            "num_key_value_heads": 4,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": ORIGINAL,
                "factor": 512 / ORIGINAL,
                **FACTORS,
            },
        },
    ),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": ORIGINAL,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
        },
    ),
}


def model_of(kind: str) -> Any:
    family, options = KINDS[kind]
    config = AutoConfig.for_model(family, **tiny_models.sizes(**options))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_losses_do_not_depend_on_the_other_rows_of_a_batch(kind: str) -> None:
    model = model_of(kind)
    rotary_embeddings.forget_longest(model)
    draw = torch.Generator().manual_seed(1)
    lengths = (10, 70, ORIGINAL, 45, 20, 30)
    ids = [torch.randint(5, 90, (length,), generator=draw).tolist() for length in lengths]
    documents = [Encoded(row, [(1, len(row))]) for row in ids]
    with torch.no_grad():
        alone = [scoring.token_losses(model, [one], 0, 1)[0][0] for one in documents]
        together = [loss for loss, _ in scoring.token_losses(model, documents, 0, 8)]
    assert together == pytest.approx(alone, rel=1e-5)


def test_requests_of_lm_eval_do_not_depend_on_the_others_of_a_batch() -> None:
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    from lm_eval.api.instance import Instance

    from finetune.evaluation import lm_eval_harness

    model, tokenizer = model_of("longrope"), AutoTokenizer.from_pretrained(MODEL)
    pairs = [(f"Question {number}?", " red") for number in range(6)] + [("very " * 60, " blue")]

    def answers(size: int) -> tuple[list[Any], list[Any]]:
        engine = lm_eval_harness.language_model(model, tokenizer, size, None)
        scored = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        told = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
        asked = [Instance("generate_until", {}, (pair[0], told), 0) for pair in pairs]
        losses = [round(loss, 3) for loss, _ in engine.loglikelihood(scored, disable_tqdm=True)]
        return losses, engine.generate_until(asked, disable_tqdm=True)

    assert answers(8) == answers(1)


def test_dynamic_frequencies_do_not_depend_on_earlier_batches() -> None:
    model, fresh = model_of("dynamic"), model_of("dynamic")
    rotary_embeddings.forget_longest(model)
    short, longer, longest = (torch.arange(5, 5 + length)[None] for length in (20, 60, 80))
    with torch.no_grad():
        wanted = [fresh(ids).logits for ids in (short, longer)]
        model(longest)
        for ids, expected in zip((longer, short), reversed(wanted), strict=True):
            assert torch.equal(model(ids).logits, expected)
        fresh(longest)
        assert not torch.equal(fresh(longer).logits, wanted[1]), "transformers keeps the longest"


def test_batch_limit_of_layers_with_two_kinds_of_embeddings() -> None:
    config: Any = AutoConfig.for_model("llama", max_position_embeddings=512)
    assert token_limits.batch_limit(config) is None
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    config.rope_parameters = {"full_attention": longrope, "sliding_attention": {"rope_type": "dynamic"}}
    assert token_limits.batch_limit(config) == 64


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_long_sequences_passes_its_checks_and_an_evaluation_does_not_change_it(
    kind: str, train: Callable[..., RunFolder], tmp_path: Path
) -> None:
    model = tiny_models.save(tmp_path / "model", model_of(kind))
    long, short = "very " * 60, "very"
    chats = [
        (f"Say {number} {long if number in (1, 9) else short}", f"Word {number}") for number in range(12)
    ]
    rows = tiny_models.rows(tmp_path / "rows.jsonl", chats)
    held_out = tiny_models.rows(tmp_path / "held_out.jsonl", [(f"Say {long}{long}", "Two."), ("Hi", "Yes.")])
    given = [f"model.name={model}", f"data.name={rows}", f"data.validation={held_out}"]
    given += ["train.max_steps=3", "adapter.r=4", "adapter.target_modules=all-linear", "data.packing=false"]
    given += ["train.per_device_train_batch_size=4", "eval.generate=false", "data.max_length=256"]
    plain, evaluated = train(*given), train(*given, "eval.eval_steps=1", name="evaluated")
    losses = [[line["loss"] for line in metrics(run) if "loss" in line] for run in (plain, evaluated)]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
