"""The model card: the Hub's own format, what it says of base, license and results, and how to load."""

import json

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.data.source_loading import hub_name
from finetune.export import base_model, model_card
from finetune.recipe import loader
from finetune.recipe.schema import Publish, Source

SETS = [
    Source(name="org/set", split="train"),
    Source(name="org/set", subset="fr", split="train"),
    Source(name="org/a", split="test"),
    Source(name="imdb", split="train"),
]
SOURCES = {hub_name(source): "abc" for source in SETS} | {"train.jsonl": "d", "train.jsonl (2)": "e"}
LORA = {"peft_type": "LORA", "r": 16, "bias": "none"}
RESULTS = {
    "base": {"loss": 1.9, "exact_match": None, "ended": None},
    "tuned": {"loss": 0.3, "exact_match": None, "ended": None},
    "difference": {"loss": {"value": -1.6, "low": -1.7, "high": -1.5, "rows": 12, "verdict": "better"}},
    "verdict": {
        "word": "better",
        "why": "Validation loss fell from 1.9 to 0.3 | nats.",
        "forgot": ["general_text"],
    },
    "tasks": {
        "arc": {
            "base": {"acc": 0.25, "acc_stderr": 0.01},
            "tuned": {"acc": 0.5, "acc_stderr": 0.02},
            "difference": {"acc": {"value": 0.25, "low": 0.2, "high": 0.3, "rows": 9, "verdict": "better"}},
            "main": "acc",
        }
    },
}


@pytest.fixture
def made(recipe_file, tmp_path):
    """`made(kind, results, **publish)`: the card of a run whose base is a folder, or `base=` on the Hub."""

    def make(
        kind: str = "adapter",
        results=None,
        config=None,
        base="{model}",
        merge=None,
        add_tokens=(),
        exports=None,
        **publish,
    ) -> ModelCard:
        text = f"model: {{name: '{base}', add_tokens: {json.dumps(add_tokens)}}}\n"
        text += "data: {name: '{data}'}\nadapter: {type: lora}\n"
        loaded = loader.load(recipe_file(text + f"publish: {json.dumps(publish)}\n"))
        staged = tmp_path / "staged"
        staged.mkdir()
        for name, content in {
            "eval.json": results or {},
            "export.json": exports or {},
            "adapter_config.json": config or LORA,
            "checks.json": [
                {"option": "a|b", "expected": "1", "actual": "2\n3", "how": "x", "passed": False}
            ],
            "data_report.json": {"train": {"sources": SOURCES, "kept": 9}, "validation": {"kept": 50}},
        }.items():
            (staged / name).write_text(json.dumps(content))
        (staged / "recipe.resolved.yaml").write_text("model: {}\n")
        found = base_model.find(loaded.model, loaded.publish, config or LORA, online=False)
        return model_card.make(staged, loaded, found, kind, "org/tuned", merge)

    return make


def test_what_the_hub_reads(made) -> None:
    written = made(results=RESULTS, base="org/base", license="mit")
    again = ModelCard(str(written))
    assert again.data.to_dict() == written.data.to_dict(), "the metadata comes back as it was written"
    assert again.data.base_model == "org/base" and again.data.base_model_relation == "adapter"
    assert again.data.library_name == "peft" and again.data.license == "mit"
    assert again.data.datasets == ["org/set", "org/a", "imdb"], "ids alone, once, and no local file"
    assert "base_model:adapter:org/base" in again.data.tags
    loss, accuracy = again.data.eval_results
    assert (loss.metric_type, loss.metric_value) == ("loss", 0.3)
    assert (accuracy.dataset_name, accuracy.metric_value) == ("arc", 0.5)
    assert accuracy.metric_name == "acc (base model 0.25, change 0.25 (95% CI 0.2 to 0.3) better)"


def test_what_people_read(made) -> None:
    written = made(results=RESULTS, base="org/base")
    text = written.text
    assert written.data.license == "other"
    assert "**Better than the base model, but worse on general tasks**: Validation loss fell" in text
    assert "from 1.9 to 0.3 | nats." in text
    assert "| validation loss | 1.9 | 0.3 | -1.6 (95% CI -1.7 to -1.5) better |" in text
    assert "| arc: acc | 0.25 | 0.5 | 0.25 (95% CI 0.2 to 0.3) better |" in text
    assert "| a\\|b | 1 | 2 3 | NO |" in text, "a cell stays a cell"
    assert 'PeftModel.from_pretrained(base, "org/tuned")' in text
    assert "--enable-lora --max-lora-rank 16 --lora-modules tuned=org/tuned" in text
    assert "license of the base model is unknown" in text and "eos_token_id" not in text


def test_an_adapter_is_loaded_such_that_it_ends_its_answers(made) -> None:
    """As evaluation had it; the base's generation config may not know the end of turn that was trained."""
    stops = {"answers": [1, 3], "model": [1]}
    text = made(results={**RESULTS, "settings": {"stops": stops}}).text
    assert "model.generation_config.eos_token_id = [1, 3]  # end of an answer; the base model has [1]" in text


def test_a_base_with_padded_embeddings_is_loaded_as_it_was_trained(made, two_layers, tmp_path) -> None:
    """A run that added a token which had a row already shrinks nothing; nor do the lines of its card."""
    text = made(base=str(two_layers), add_tokens=["<a>"]).text
    tokenizer = AutoTokenizer.from_pretrained(two_layers)
    resizing = [line for line in text.splitlines() if line.startswith(("rows =", "base.resize"))]
    for padded, rows in ((4224, 4224), (4096, 4097)):
        base = AutoModelForCausalLM.from_pretrained(two_layers)
        base.resize_token_embeddings(padded, mean_resizing=False)
        tokenizer.add_tokens(["<a>"])
        exec("\n".join(resizing), {"base": base, "tokenizer": tokenizer})
        assert len(base.get_input_embeddings().weight) == rows


def test_an_older_run_without_results(made) -> None:
    written = made()
    assert "The run has no validation set" in written.text and "model-index" not in written.data.to_dict()
    assert "sha256 `" in written.text, "a base that is a folder is known by its hashes"


def test_a_model_needs_no_base(made) -> None:
    written = made("merged", base="org/base")
    assert written.data.library_name == "transformers" and written.data.base_model_relation == "finetune"
    assert 'AutoModelForCausalLM.from_pretrained("org/tuned")' in written.text and "Peft" not in written.text
    assert "vllm serve org/tuned" in written.text


def test_a_merge_without_scores_shows_the_adapter_s_as_such(made) -> None:
    written = made("merged", RESULTS, base="org/base", merge={"quantized": None, "scores": {}})
    assert (
        "| base model | adapter |" in written.text
        and "Scores of the base model and the adapter before the merge" in written.text
    )
    assert (
        "The adapter before the merge: **Better than the base model" in written.text
        and "torchao" not in written.text
    )
    for result in written.data.eval_results:
        assert "of the adapter before merging (base model" in result.metric_name


def test_quantized_weights_have_scores_of_their_own(made) -> None:
    scores = {"tuned": {"loss": 0.31, "exact_match": None}, "quantized": {"loss": 0.45, "exact_match": None}}
    merge = {"quantized": "int8", "storage": "int8, one scale per output", "scores": scores}
    written = made("merged", RESULTS, base="org/base", merge=merge)
    loss, accuracy = written.data.eval_results
    assert loss.metric_value == 0.45
    assert loss.metric_name == "validation loss, nats per token (adapter before merging 0.31)"
    assert accuracy.metric_name.startswith("acc of the adapter before merging")
    assert "| validation loss | 0.31 | 0.45 |" in written.text
    assert "pip install torchao" in written.text and "int8, one scale per output" in written.text


def test_the_rows_are_those_that_were_evaluated(made) -> None:
    notes = ["other.jsonl is not the validation set of the run"]
    text = made(results={**RESULTS, "settings": {"rows": 7, "notes": notes}}).text
    assert (
        "On 7 validation examples" in text
        and "Note: other.jsonl is not the validation set of the run." in text
    )


def test_an_older_evaluation_does_not_say_its_rows(made) -> None:
    assert "On 50 validation examples" in made(results=RESULTS).text


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "IA3"}, "a IA3 adapter"),
        ({**LORA, "use_dora": True}, "DoRA"),
        ({**LORA, "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({**LORA, "rank_pattern": {"q_proj": 4}}, "ranks"),
        ({**LORA, "bias": "all"}, "biases"),
        ({**LORA, "r": 1024}, "rank 1024"),
        (
            {**LORA, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
            "parameters mlp.experts.down_proj, mlp.experts.gate_up_proj as an adapter, except for",
        ),
        (
            {**LORA, "target_parameters": ["mlp.gate.weight"]},
            "parameters mlp.gate.weight as an adapter. Merge",
        ),
    ],
)
def test_what_vllm_does_not_serve_is_merged_first(config, why) -> None:
    said = model_card.vllm(config, base_model.Base("org/base", True), "org/tuned")
    assert why in said and "finetune merge" in said and "--enable-lora" not in said


@pytest.mark.parametrize("config", [{"peft_type": "PROMPT_TUNING"}, {**LORA, "lora_bias": True}])
def test_what_neither_vllm_serves_nor_peft_merges_is_used_with_peft(config) -> None:
    said = model_card.vllm(config, base_model.Base("org/base", True), "org/tuned")
    assert "Use the adapter with PEFT, which can't merge it" in said and "finetune merge" not in said


@pytest.mark.parametrize(("rank", "most"), [(4, 8), (8, 8), (65, 128), (512, 512)])
def test_vllm_takes_some_ranks_only(rank: int, most: int) -> None:
    assert f"--max-lora-rank {most} " in model_card.vllm(
        {**LORA, "r": rank}, base_model.Base("a/b", True), "c/d"
    )


def test_publish_is_private_unless_said() -> None:
    assert Publish().private and Publish().repo is None


def test_the_serving_check_of_each_export_is_on_the_card(made) -> None:
    check = {
        "reader": "llama.cpp",
        "token_ids": {"prompts": 50, "different": 0},
        "stop_tokens": {"expected": [2], "missing": []},
        "answers": {"prompts": 5, "tokens": 60, "largest_difference": 0.012, "tolerance": 0.3, "agree": True},
        "loss": {"tokens": 512, "finetune": 0.3142, "runtime": 0.3151, "tolerance": 0.1, "agree": True},
    }
    reports = {"export-gguf-q8_0": {"target": "gguf", "quantize": "q8_0", "serving_check": check}}
    reports["b"] = {
        "target": "mlx",
        "quantize": "bf16",
        "serving_check": {"reader": None, "not_run": "a | b"},
    }
    text = made(exports=reports).text
    assert "### gguf, q8_0 (export-gguf-q8_0)" in text and "| token ids | 50 prompts, 0 differ |" in text
    assert "60 tokens: largest difference 0.012, allowed 0.3" in text and "0.3151, in finetune 0.3142" in text
    assert "| not run | a \\| b |" in text


def test_a_card_without_exports_has_no_section_of_them(made) -> None:
    assert "## Exports" not in made().text
