"""Models at the edges: what `check` says of them is what `train` does, and never a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from finetune.run_folder.run_folder import RunFolder
from support import architectures
from support.paths import MODEL
from support.tiny_models import recipe, rows, save, sizes

TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}


def both(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[int], list[str]]:
    """Exit codes and messages of `check` and `train`."""
    codes, said = [], []
    capsys.readouterr()
    for command in ("check", "train"):
        codes.append(main.main([command, str(path)]))
        said.append(
            re.sub(r"\d+ errors?; nothing was started.*", "", capsys.readouterr().err, flags=re.DOTALL)
        )
    assert "Traceback" not in "".join(said)
    return codes, said


def causal(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    return AutoModelForCausalLM.from_config(config)


def test_check_and_train_tokenizer_in_python_refuse_alike(tmp_path, capsys) -> None:
    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    config = transformers.LlamaConfig(
        **{**sizes(), "vocab_size": 384, "eos_token_id": 1, "bos_token_id": None}
    )
    codes, said = both(recipe(tmp_path, save(tmp_path / "model", causal(config), tokenizer)), capsys)
    assert codes == [2, 2] and said[0] == said[1]
    assert "ByT5Tokenizer, a tokenizer in Python" in said[0]


def test_train_config_without_attention_heads_trains(tmp_path, capsys) -> None:
    own = {
        name: value
        for name, value in sizes().items()
        if name not in ("num_attention_heads", "intermediate_size")
    }
    model = save(tmp_path / "model", causal(transformers.MambaConfig(**own, state_size=8)))
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "x_proj"]}
    codes, said = both(recipe(tmp_path, model, adapter=adapter), capsys)
    assert codes == [0, 0], said


def test_train_experts_by_another_name_trains_and_keeps_the_models_config(tmp_path, capsys) -> None:
    """GraniteMoE asks for its router's loss by itself; the saved model must not, or `generate` fails."""
    model = save(tmp_path / "model", causal(transformers.GraniteMoeConfig(**sizes(**EXPERTS))))
    held = rows(tmp_path / "held.jsonl", [("Say hi", "Hi, and hello.")])
    asked = {"adapter": {"type": "full"}, "eval": {"generate": True}, "data": {"validation": str(held)}}
    codes, said = both(recipe(tmp_path, model, **asked), capsys)
    assert codes == [0, 0], said
    saved = json.loads((RunFolder(tmp_path / "run").model / "config.json").read_text())
    assert "num_experts" not in saved and saved["output_router_logits"] is False


def test_train_router_loss_of_routed_experts_is_added(tmp_path, capsys) -> None:
    latent = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    }
    routed = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    config = transformers.DeepseekV3Config(
        **sizes(moe_intermediate_size=16, num_key_value_heads=4, **latent, **routed)
    )
    model = save(tmp_path / "model", causal(config))
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    codes, said = both(recipe(tmp_path, model, adapter=adapter, train={"router_aux_loss_coef": 1}), capsys)
    assert codes == [0, 0], said
    lines = (RunFolder(tmp_path / "run").path / "metrics.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("aux_loss", 0) > 0 for line in lines)


@pytest.mark.parametrize("coefficient", [0, 0.0, 1])
def test_train_router_loss_as_an_integer_is_a_coefficient(tmp_path, capsys, coefficient) -> None:
    model = save(tmp_path / "model", causal(transformers.MixtralConfig(**sizes(**EXPERTS))))
    path = recipe(
        tmp_path, model, train={"router_aux_loss_coef": coefficient, "max_steps": 1, "warmup_steps": 0}
    )
    codes, said = both(path, capsys)
    assert codes == [0, 0], said


def test_check_and_train_convolutions_packed_refuse_alike(tmp_path, capsys) -> None:
    config = transformers.Lfm2Config(**sizes(num_key_value_heads=2, layer_types=["conv", "full_attention"]))
    model = save(tmp_path / "model", causal(config))
    codes, said = both(recipe(tmp_path, model, data={"packing": True}), capsys)
    assert codes == [3, 3] and said[0] == said[1] and "help:      data.packing: false" in said[0]
    assert main.main(["check", str(tmp_path / "recipe.yaml"), "data.packing=false"]) == 0


def test_check_and_train_one_mask_for_all_tokens_refuse_alike(tmp_path, capsys) -> None:
    """GPT-Neo's layers hold a mask of as many rows as the model has positions."""
    own = {
        name: value
        for name, value in sizes().items()
        if name not in ("num_attention_heads", "num_hidden_layers")
    }
    kinds = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    config = transformers.GPTNeoConfig(**{**own, **kinds, "max_position_embeddings": 64})
    model = save(tmp_path / "model", causal(config))
    codes, said = both(recipe(tmp_path, model, data={"packing": True, "max_length": 64}), capsys)
    assert codes == [2, 2] and said[0] == said[1]
    assert "help:      train.per_device_train_batch_size: 1 or data.packing: false" in said[0]
    short = {"per_device_train_batch_size": 1, "effective_batch_size": 1}
    codes, said = both(recipe(tmp_path, model, data={"packing": True, "max_length": 64}, train=short), capsys)
    assert codes == [0, 0], said


def test_train_multimodal_wrapper_trains_its_text_model(tmp_path, capsys) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "head_dim": 16}
    text = transformers.MistralConfig(**sizes(num_key_value_heads=2, head_dim=8))
    config = transformers.Mistral3Config(
        text_config=text, vision_config={"model_type": "pixtral", **vision}, image_token_index=10
    )
    model = save(tmp_path / "model", transformers.Mistral3ForConditionalGeneration(config))
    codes, said = both(recipe(tmp_path, model), capsys)
    assert codes == [0, 0], said
    trained = load_file(RunFolder(tmp_path / "run").adapter / "adapter_model.safetensors")
    assert trained and all("language_model" in name for name in trained)
    assert main.main(["merge", str(tmp_path / "run"), "--quiet"]) == 0


def test_check_and_train_padding_token_without_a_row_pad_by_another(tmp_path, capsys) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    model = save(tmp_path / "model", causal(transformers.LlamaConfig(**sizes())), tokenizer)
    rows(tmp_path / "held.jsonl", [("Say hi", "Hi, and hello."), ("Two plus one?", "Three, I think.")])
    path = recipe(tmp_path, model, data={"validation": str(tmp_path / "held.jsonl")}, eval={"generate": True})
    assert main.main(["check", str(path)]) == 0
    note = "the model has no embedding for the tokenizer's padding token <pad> (id "
    assert note in capsys.readouterr().out
    assert main.main(["train", str(path)]) == 0
    assert note in capsys.readouterr().out
    saved = AutoTokenizer.from_pretrained(RunFolder(tmp_path / "run").adapter)
    assert saved.pad_token == saved.eos_token


def test_check_and_train_examples_beyond_the_positions_are_too_long(tmp_path, capsys) -> None:
    own = {name: value for name, value in sizes().items() if name != "intermediate_size"}
    config = transformers.OPTConfig(
        **{**own, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 48}
    )
    model = save(tmp_path / "model", causal(config))
    rows(tmp_path / "rows.jsonl", [("Say it", " ".join(f"word{n}" for n in range(60))), *[("a", "b")] * 3])
    path = recipe(tmp_path, model, data={"max_length": 512, "expect": {"duplicates": 1.0}})
    codes, said = both(path, capsys)
    assert codes == [2, 2] and said[0] == said[1]
    assert "1 are longer than the model's 48 positions" in said[0] and "raise data.max_length" not in said[0]
    allowed = {"max_length": 512, "expect": {"duplicates": 1.0, "dropped": 0.5}}
    held = {"validation": str(rows(tmp_path / "held.jsonl", [("Say hi", "Hi.")]))}
    path = recipe(tmp_path, model, data={**allowed, **held}, eval={"generate": True})
    codes, said = both(path, capsys)
    assert codes == [0, 0], said
    asked = [str(path), "eval.max_new_tokens=512", f"train.output_dir={tmp_path / 'other'}"]
    assert main.main(["train", *asked]) == 2
    assert "of the model's 48 positions" in capsys.readouterr().err


def test_train_model_whose_forward_fails_names_library_and_stage(tmp_path, capsys) -> None:
    config = transformers.Qwen2Config(**sizes(num_key_value_heads=2))
    model = save(tmp_path / "model", causal(config))
    written = json.loads((model / "config.json").read_text())
    written["layer_types"] = ["full_attention", "no_such_attention"]
    (model / "config.json").write_text(json.dumps(written))
    path = recipe(tmp_path, model)
    assert main.main(["train", str(path)]) in (2, 3, 5)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said


@pytest.mark.parametrize("name", ["T5", "classifier", "encoder", "headless"])
def test_check_and_train_no_causal_language_model_refuse_alike(tmp_path, capsys, name) -> None:
    small = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    made = {
        "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=99, **small)),
        "classifier": lambda: transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**sizes())
        ),
        "encoder": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**sizes())),
        "headless": lambda: transformers.Qwen3Model(
            transformers.Qwen3Config(**sizes(tie_word_embeddings=False))
        ),
    }
    codes, said = both(recipe(tmp_path, save(tmp_path / "model", made[name]())), capsys)
    assert codes == [2, 2] and said[0] == said[1] and "finetune does not support" in said[0]


def test_prove_apart_dropout_without_a_module_hides_no_leak() -> None:
    """BioGPT's attention has dropout that is no module, and its mask no borders between documents."""
    from finetune.core.errors import UserError
    from finetune.core.run_checks import RunChecks
    from finetune.speed.packing_isolation import prove_apart

    torch.manual_seed(0)
    model = causal(transformers.BioGptConfig(**sizes(max_position_embeddings=128)))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.08)
    with pytest.raises(UserError, match="attend to each other"):
        prove_apart(model.train(), 64, "sdpa", RunChecks())


def short_model(folder: Path, **more: object) -> Path:
    """A model with few positions; `more` changes its config."""
    values = {**sizes(num_key_value_heads=2), "max_position_embeddings": 64, **more}
    return save(folder / "model", causal(transformers.LlamaConfig(**values)))


def odd_model(folder: Path, template: str | None = None) -> Path:
    """A model whose tokenizer has one token more than the embedding has rows: `<odd>`."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens(["<odd>"])
    tokenizer.chat_template = template or tokenizer.chat_template
    return save(folder / "model", causal(transformers.LlamaConfig(**sizes())), tokenizer)


def test_check_and_train_forgetting_text_with_unknown_ids_refuse_alike(tmp_path, capsys) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "plain"}\n{"text": "an <odd> one"}\n')
    codes, said = both(recipe(tmp_path, odd_model(tmp_path), eval={"forgetting": str(texts)}), capsys)
    assert codes == [2, 2] and said[0] == said[1]
    assert (
        "eval.forgetting: texts have token ids that the model does not have" in said[0]
        and "text 2 (id" in said[0]
    )


CHOICES = (
    'kind: multiple_choice\nprompt: "{{ q }}"\nchoices: ["yes", "{{ a }}", "a long answer"]\nanswer: "0"\n'
)
LM_EVAL = (
    "task: asked\ndataset_path: json\ndataset_kwargs: {data_files: {test: asked.jsonl, few: few.jsonl}}\n"
    "test_split: test\nfewshot_split: few\nmetric_list: [{metric: acc}]\noutput_type: multiple_choice\n"
    'doc_to_text: "{{ q }}"\ndoc_to_choice: "{{ [\'yes\', a] }}"\ndoc_to_target: 0\n'
)
PLAIN, ODD = {"q": "One", "a": "two"}, {"q": "Two", "a": "<odd>"}


@pytest.mark.parametrize(
    ("task", "questions", "few"),
    [
        (f"data: asked.jsonl\n{CHOICES}", [PLAIN, ODD], [PLAIN]),
        (f"data: asked.jsonl\nchat: true\n{CHOICES}", [PLAIN, ODD], [PLAIN]),
        ('data: asked.jsonl\nkind: exact_match\nprompt: "{{ a }}"\nanswer: x\n', [PLAIN, ODD], [PLAIN]),
        ('data: asked.jsonl\nkind: perplexity\nprompt: "{{ a }}"\n', [PLAIN, ODD], [PLAIN]),
        (LM_EVAL, [PLAIN, ODD], [PLAIN]),
        (LM_EVAL, [PLAIN, {"q": "<odd>", "a": "b"}], [PLAIN]),
        (f"{LM_EVAL}num_fewshot: 1\n", [PLAIN, PLAIN], [{"q": "<odd>", "a": "b"}]),
    ],
    ids=["choice", "choice in a chat", "prompt", "text", "lm-eval's choice", "lm-eval's prompt", "few-shot"],
)
def test_check_and_train_task_text_with_unknown_ids_refuse_alike(
    tmp_path, capsys, task, questions, few
) -> None:
    for name, examples in (("asked", questions), ("few", few)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in examples))
    (tmp_path / "asked.yaml").write_text(task)
    path = recipe(tmp_path, odd_model(tmp_path), eval={"tasks": [str(tmp_path / "asked.yaml")]})
    codes, said = both(path, capsys)
    assert codes == [2, 2] and said[0] == said[1]
    assert (
        "eval.tasks: texts have token ids that the model does not have" in said[0]
        and "asked, example 2 (id" in said[0]
    )


def test_check_and_train_task_of_a_tokenizer_with_unused_ids_pass(tmp_path, capsys) -> None:
    for name in ("asked", "few"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(PLAIN) + "\n")
    (tmp_path / "asked.yaml").write_text(LM_EVAL)
    path = recipe(tmp_path, odd_model(tmp_path), eval={"tasks": [str(tmp_path / "asked.yaml")]})
    codes, said = both(path, capsys)
    assert codes == [0, 0], said


def test_check_and_train_prompt_with_unknown_ids_refuse_alike(tmp_path, capsys) -> None:
    """The chat template writes `<odd>` only where an answer is to begin."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<odd>{% endif %}"
    )
    held = rows(tmp_path / "held.jsonl", [("Say hi", "Hi, and hello.")])
    asked = {"eval": {"generate": True}, "data": {"validation": str(held)}}
    codes, said = both(recipe(tmp_path, odd_model(tmp_path, template), **asked), capsys)
    assert codes == [2, 2] and said[0] == said[1] and "token ids that the model does not have" in said[0]


def test_evaluate_other_validation_examples_with_unknown_ids_is_refused(tmp_path, capsys) -> None:
    assert main.main(["train", str(recipe(tmp_path, odd_model(tmp_path)))]) == 0
    held = rows(tmp_path / "other.jsonl", [("Say hi", "Hi."), ("Say it", "An <odd> word.")])
    capsys.readouterr()
    assert main.main(["evaluate", str(tmp_path / "run"), f"data.validation={held}"]) == 2
    said = capsys.readouterr().err
    assert "token ids that the model does not have" in said and "other.jsonl:2 (id" in said


def test_check_vocabulary_beyond_the_embedding_refuses_as_train(tmp_path, capsys) -> None:
    """The tokenizer of another model, whose ids stand in its vocabulary and not among its added tokens."""
    config = transformers.LlamaConfig(**{**sizes(), "vocab_size": 300})
    model = save(tmp_path / "model", causal(config))
    codes, said = both(recipe(tmp_path, model), capsys)
    assert codes == [2, 2] and said[0] == said[1] and "token ids that the model does not have" in said[0]


def test_check_and_train_count_forgetting_texts_that_are_cut(tmp_path, capsys) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "many words " * 60}) + '\n{"text": "few words"}\n')
    held = rows(tmp_path / "held.jsonl", [("Say hi", "Hi.")])
    asked = {"eval": {"forgetting": str(texts)}, "data": {"validation": str(held)}}
    path = recipe(tmp_path, short_model(tmp_path), **asked)
    note = (
        "eval.forgetting: 1 of 2 texts have more than 64 tokens, the model's maximum. "
        "finetune uses their first 64 tokens"
    )
    assert main.main(["check", str(path)]) == 0
    assert note in " ".join(capsys.readouterr().out.split())
    assert main.main(["train", str(path)]) == 0
    assert " ".join(capsys.readouterr().out.split()).count(note) == 1
    notes = json.loads((tmp_path / "run" / "eval.json").read_text())["settings"]["notes"]
    assert note in notes


ROUTERLESS = {
    "jamba": {"num_experts": 1},
    "qwen2_moe": {"mlp_only_layers": [0, 1]},
    "qwen3_moe": {"mlp_only_layers": [0, 1]},
    "granitemoehybrid": {"num_local_experts": 0, "num_experts_per_tok": 0},
    "doge": {"is_moe": False},
    "doge with experts": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 4},
}


@pytest.mark.parametrize("loss", ["auto", "trl"])
@pytest.mark.parametrize("name", ROUTERLESS)
def test_a_mixture_without_routers_trains_and_says_so(tmp_path, capsys, name, loss) -> None:
    """Its config has a coefficient. TRL then reads logits of routers that the model does not have."""
    family = name.partition(" ")[0]
    base = architectures.CONFIGS.get(family) or {
        **architectures.CONFIGS["llama"], "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    own = {**base, **ROUTERLESS[name], **{key: sizes()[key] for key in TOKENS}}
    model = save(tmp_path / "model", causal(transformers.AutoConfig.for_model(family, **own)))
    one = {"max_steps": 1, "warmup_steps": 0}
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8}  # of all linear layers, which PEFT takes for experts
    path = recipe(tmp_path, model, adapter=adapter, train=one, speed={"loss": loss})
    for command in ("check", "train"):
        assert main.main([command, str(path)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert said.count("train.router_aux_loss_coef: 0, because this") == 1
    lines = (RunFolder(tmp_path / "run").path / "metrics.jsonl").read_text().splitlines()
    assert not any("aux_loss" in json.loads(line) for line in lines)
    codes, said = both(recipe(tmp_path, model, train={**one, "router_aux_loss_coef": 0.1}), capsys)
    assert codes == [2, 2]
    assert all("the base model has no router" in text for text in said)


@pytest.mark.parametrize("adapter", ["prompt_tuning", "p_tuning", "prefix_tuning"])
def test_neftune_with_virtual_tokens_is_refused_where_transformers_fails(tmp_path, capsys, adapter) -> None:
    model = save(tmp_path / "model", causal(transformers.GPT2Config(**sizes())))
    virtual = {"type": adapter, "num_virtual_tokens": 3}
    noise = {"neftune_noise_alpha": 5.0, "max_steps": 1, "warmup_steps": 0}
    codes, said = both(recipe(tmp_path, model, adapter=virtual, train=noise), capsys)
    assert codes == [2, 2]
    assert all(f"NEFTune does not train with {adapter} on gpt2" in text for text in said)


def test_activation_checkpointing_of_a_family_without_it_names_the_other_values(tmp_path, capsys) -> None:
    own = {**architectures.CONFIGS["jetmoe"], **{key: sizes()[key] for key in TOKENS}}
    model = save(tmp_path / "model", causal(transformers.AutoConfig.for_model("jetmoe", **own)))
    for value, code in (("full", 3), ("full:1", 3), ("norms", 0)):
        one = {"max_steps": 1, "warmup_steps": 0, "output_dir": str(tmp_path / value)}
        path = recipe(tmp_path, model, train=one, speed={"activation_checkpointing": value})
        assert main.main(["train", str(path)]) == code
        said = capsys.readouterr()
        refused = "transformers has no activation checkpointing for jetmoe" in said.out + said.err
        assert refused is bool(code), value


def test_prefix_tuning_with_a_router_loss_is_refused_alike(tmp_path, capsys) -> None:
    """PEFT lengthens the attention mask, by which the loss counts the tokens."""
    model = save(tmp_path / "model", causal(transformers.MixtralConfig(**sizes(**EXPERTS))))
    adapter = {"type": "prefix_tuning", "num_virtual_tokens": 4}
    asked = {"router_aux_loss_coef": 0.1, "max_steps": 1, "warmup_steps": 0}
    codes, said = both(recipe(tmp_path, model, adapter=adapter, train=asked), capsys)
    assert codes == [2, 2]
    assert all("prefix_tuning can't train with the router loss" in text for text in said)
