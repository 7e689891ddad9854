"""What a folder of somebody else's may not reach: files outside of it, and what is missing in it."""

import json
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.adapters import continue_from
from finetune.cli import main
from finetune.core import untrusted_files
from finetune.core.errors import UserError
from finetune.evaluation import reopen
from finetune.models import checkpoint_headers, tokenizer_setup
from finetune.recipe.schema import Model
from support.paths import MODEL
from support.rejected import refused
from support.soak import soak_except

OUTSIDE = [
    "../victim/model.safetensors",
    "/etc/model.safetensors",
    "a/../../model.safetensors",
    "sub/model.safetensors",
    "..\\model.safetensors",
    "~/model.safetensors",
    "model.safetensors/..",
    "..",
    "",
    "model\0.safetensors",
    "pytorch_model.bin",
    None,
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_names_files_of_its_folder(name: Any, weightless, capsys) -> None:
    """transformers follows `../` in an index (5.23)."""
    (weightless / untrusted_files.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(weightless, capsys, says=("outside of its folder", untrusted_files.INDEX))


@pytest.mark.parametrize("name", [*OUTSIDE[:-1], "sub/model.safetensors.index.json", 5, ["a.safetensors"]])
def test_key_of_the_weight_file_names_a_file_of_the_folder(name: Any, weightless, capsys) -> None:
    """transformers opens the file that `transformers_weights` names, also in folders below."""
    path = weightless / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "transformers_weights": name}))
    refused(weightless, capsys, says=("transformers_weights" if name else "no weights",))


@pytest.mark.parametrize(
    ("file", "key"),
    [("config.json", "configuration_files"), ("tokenizer_config.json", "fast_tokenizer_files")],
)
@pytest.mark.parametrize("named", ["config.4.0.0.json", "../x/tokenizer.4.0.json"])
def test_key_that_names_a_file_in_place_of_another_is_refused(
    file: str, key: str, named: str, weightless, capsys
) -> None:
    """transformers reads the file of the newest version that the key names."""
    path = weightless / file
    path.write_text(json.dumps({**json.loads(path.read_text()), key: [named]}))
    refused(weightless, capsys, says=("reads in place of others", f"{key}: ['{named}']"))


def test_files_of_a_distributed_checkpoint_beside_the_weights_are_refused(weightless, capsys) -> None:
    """transformers would read them in place of model.safetensors."""
    (weightless / "shard-00000-model-00001-of-00002.safetensors").write_bytes(b"")
    refused(weightless, capsys, says=("distributed checkpoint", "shard-00000-model-00001-of-00002"))


WRONG = [
    ("config.json", {"rms_norm_eps": {"__float__": "NaN"}}),
    ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": {"__float__": "Infinity"}}}),
    ("config.json", {"distributed_config": {"tp_size": 2}}),
    ("config.json", {"output_attentions": True}),
    ("config.json", {"_auto_class": "AutoConfig"}),
    ("tokenizer_config.json", {"extra_ids": 10**8, "tokenizer_class": "T5Tokenizer"}),
    ("tokenizer_config.json", {"offset": 10**8}),
    ("tokenizer_config.json", {"backend_tokenizer": "x"}),
    ("tokenizer_config.json", {"processor_class": {"content": "zz", "__type": "AddedToken"}}),
    ("tokenizer_config.json", {"model_input_names": 3}),
    ("tekken.json", {"config": {"default_num_special_tokens": 10**8}, "vocab": []}),
    ("tekken.json", {"config": {}, "vocab": [{"rank": 0, "token_bytes": "YWI=" * 10_000}]}),
]


@pytest.mark.parametrize(("file", "values"), WRONG, ids=str)
def test_value_with_which_a_model_can_not_be_trained_or_saved_is_refused(
    file: str, values: dict[str, Any], weightless, capsys
) -> None:
    path = weightless / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))
    refused(weightless, capsys, says=(file,))


def test_base_model_is_not_the_adapted_model_without_an_adapter_that_changed_its_weights() -> None:
    for init, stands in ((True, True), ("gaussian", True), ("olora", False), ("pissa_niter_4", False)):
        config = SimpleNamespace(bias="none", init_lora_weights=init)
        assert reopen.base_stands(SimpleNamespace(peft_config={"default": config})) == stands


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_config_with_too_many_values_is_refused(name: str, weightless, capsys) -> None:
    """A million stop tokens or labels made `plan` and `train` slow."""
    content = json.loads((weightless / name).read_text())
    for key, value in (("eos_token_id", [1] * 1001), ("eos_token_id", [[2]]), ("pad_token_id", "x")):
        (weightless / name).write_text(json.dumps(content | {key: value}))
        refused(weightless, capsys, says=(key, "a list of at most 1,000 integers"))
    (weightless / name).write_text(
        json.dumps(content | {"eos_token_id": 1, "id2label": dict.fromkeys(range(30_000))})
    )
    refused(weightless, capsys, says=("id2label", "at most 25,000"))
    (weightless / name).write_text(json.dumps(content | {"eos_token_id": 1, "num_labels": 10**9}))
    refused(weightless, capsys, says=("num_labels", "25,000"))


GENERATION: list[dict[str, Any]] = [
    {"num_return_sequences": 1_000_000},
    {"max_new_tokens": -1},
    {"suppress_tokens": 3},
    {"early_stopping": [1]},
    {"watermarking_config": {"a": 1}},
    {"pad_token_id": [1]},
]


@pytest.mark.parametrize("values", GENERATION)
def test_generation_config_that_transformers_refuses_is_refused(values: dict, weightless, capsys) -> None:
    path = weightless / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    refused(weightless, capsys, says=("does not accept the model's generation config", str(path)))


def test_key_of_a_generation_config_that_replaces_a_method_is_refused(weightless, capsys) -> None:
    path = weightless / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"save_pretrained": 1}))
    refused(weightless, capsys, says=("has the name of a method", str(path)))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_a_link_does_not_leave_its_folder(name: str, weightless, tmp_path, capsys) -> None:
    (tmp_path / "secret").write_text("{}")
    (weightless / name).parent.mkdir(exist_ok=True)
    (weightless / name).unlink(missing_ok=True)
    (weightless / name).symlink_to(tmp_path / "secret")
    refused(weightless, capsys, says=("a link leads out of its folder", name))


def test_the_hub_s_own_links_are_fine(weightless, tmp_path) -> None:
    home = tmp_path / "models--a--b"
    (home / "blobs").mkdir(parents=True)
    (home / "snapshots").mkdir()
    snapshot = home / "snapshots" / ("0" * 40)
    shutil.copytree(weightless, snapshot)
    (snapshot / "config.json").rename(home / "blobs" / "abc")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (snapshot / "additional_chat_templates").mkdir()
    (home / "blobs" / "def").write_text("")
    (snapshot / "additional_chat_templates" / "rag.jinja").symlink_to("../../../blobs/def")
    untrusted_files.check_files(snapshot, "model.name")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "model" / "config.json")
    with pytest.raises(UserError, match="leads out of its folder"):
        untrusted_files.check_files(snapshot, "model.name")


@pytest.mark.parametrize("to", ["gguf", "vllm"])
def test_export_of_an_adapter_with_a_link_to_another_file_is_refused(
    to: str, trained, tmp_path, capsys
) -> None:
    (tmp_path / "secret").write_text("{{ messages }}")
    adapter = shutil.copytree(trained().adapter, tmp_path / "adapter")
    (adapter / "additional_chat_templates").mkdir()
    (adapter / "additional_chat_templates" / "tool_use.jinja").symlink_to(tmp_path / "secret")
    output = tmp_path / "exported"
    assert main.main(["export", str(adapter), "--to", to, "--output", str(output)]) == 2
    assert "a link leads out of its folder" in capsys.readouterr().err and not output.exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", value) for value in ([None], {}, "abc", 10**400, float("nan"))),
        *(("lora_alpha", value) for value in ([], float("inf"), "1", 0, True)),
        *(("lora_dropout", value) for value in (1.0, -0.1, "0.1")),
        *(("alpha_pattern", {"q_proj": value}) for value in (0, float("nan"), "8")),
        *(("target_parameters", value) for value in (5, [None], "abc")),
        *(("modules_to_save", value) for value in (5, [[]], "abc")),
        ("target_modules", [["q_proj"]]),
        ("exclude_modules", {"a": 1}),
        ("layers_pattern", {"a": 1}),
        ("layers_to_transform", ["1"]),
        ("alpha_pattern", ["a"]),
        *(("trainable_token_indices", value) for value in (10**30, "abc", ["a"], {"a": 1})),
        ("megatron_config", {}),
        *(("alora_invocation_tokens", value) for value in ("x", [1, 2])),
        *(("layer_replication", value) for value in ([[0, 2]], [[0, 5]], [[0, 2]] * 10_000)),
        ("base_model_name_or_path", -1),
    ],
)
def test_adapter_s_config_with_an_odd_value_is_refused(
    key: str, value: Any, trained, tmp_path, capsys
) -> None:
    adapter = shutil.copytree(trained().adapter, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text()) | {key: value}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    for options in (["--to", "vllm", "--adapter"], ["--to", "gguf"]):
        assert main.main(["export", str(adapter), *options, "--output", str(tmp_path / "exported")]) == 2
        assert "adapter_config.json" in (said := capsys.readouterr().err) or "model.name" in said


@pytest.mark.parametrize(("key", "value"), [("use_bdlora", True), ("layers_pattern", "layers")])
def test_adapter_s_config_that_peft_refuses_ends_training_with_a_message(
    key: str, value: Any, trained, train, tmp_path, capsys
) -> None:
    adapter = shutil.copytree(trained().adapter, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text()) | {key: value}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    train(f"adapter.init_from={adapter}", f"model.name={config['base_model_name_or_path']}", code=2)
    assert "does not fit this model" in capsys.readouterr().err


def _no_merges(content: dict[str, Any]) -> None:
    content["model"]["merges"] = []


def _id_beyond_the_embedding(content: dict[str, Any]) -> None:
    content["model"]["vocab"][next(reversed(content["model"]["vocab"]))] = 500_000


def _id_that_takes_all_memory(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["qzqz"] = 2**31


def _many_new_tokens(content: dict[str, Any]) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    first = 1 + max(content["model"]["vocab"].values())
    content["added_tokens"] += [{"id": first + n, "content": f"<x{n}>", **flags} for n in range(2000)]


@pytest.mark.parametrize(
    "change",
    soak_except(
        [_id_that_takes_all_memory],
        [_no_merges, _id_beyond_the_embedding, _id_that_takes_all_memory, _many_new_tokens],
    ),
)
def test_export_of_an_adapter_with_an_odd_tokenizer_is_refused(
    change: Any, trained, tmp_path, capsys
) -> None:
    adapter = shutil.copytree(trained().adapter, tmp_path / "adapter")
    content = json.loads((adapter / "tokenizer.json").read_text())
    change(content)
    (adapter / "tokenizer.json").write_text(json.dumps(content))
    assert main.main(["export", str(adapter), "--to", "gguf", "--output", str(tmp_path / "exported")]) == 2
    assert "token" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["mlx", "gguf", "vllm"])
@pytest.mark.parametrize("content", [b"", b"\x08" + b"\0" * 7 + b"[1, 2, 3", b"\xff" * 8], ids=str)
def test_export_of_an_adapter_with_damaged_weights_is_refused(
    content: bytes, to: str, trained, tmp_path, capsys
) -> None:
    adapter = shutil.copytree(trained().adapter, tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").write_bytes(content)
    output = str(tmp_path / "exported")
    assert main.main(["export", str(adapter), "--to", to, "--adapter", "--output", output]) in (2, 4)
    assert str(adapter) in capsys.readouterr().err


@pytest.mark.parametrize("to", ["mlx", "gguf", "vllm"])
def test_export_of_an_adapter_with_nan_is_refused(to: str, trained, tmp_path, capsys) -> None:
    from safetensors.torch import load_file, save_file

    adapter = shutil.copytree(trained().adapter, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[min(tensors)] *= float("nan")
    save_file(tensors, adapter / "adapter_model.safetensors")
    output = str(tmp_path / "exported")
    assert main.main(["export", str(adapter), "--to", to, "--adapter", "--output", output]) == 4
    assert "NaN or Inf" in capsys.readouterr().err


def test_weights_with_a_header_that_is_too_large_to_read_are_refused(tmp_path) -> None:
    """safetensors reads up to 100 MB. A sparse file could state a header of any size."""
    size = checkpoint_headers.LARGEST_HEADER + 1
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(size.to_bytes(8, "little"))
        file.truncate(8 + size)
    with pytest.raises(UserError, match="its header has 100,000,001 bytes, more than 100,000,000"):
        checkpoint_headers.tensors(tmp_path)


@pytest.mark.parametrize("name", ["eval.json", "adapter/tokenizer.json"])
def test_what_is_published_is_no_link_to_elsewhere(name: str, trained, tmp_path, capsys) -> None:
    run = trained()
    (tmp_path / "id_rsa").write_text("{}")
    (run.path / name).unlink()
    (run.path / name).symlink_to(tmp_path / "id_rsa")
    assert main.main(["publish", str(run.path), "--dry-run"]) == 2
    assert "the link leads out of its folder" in capsys.readouterr().err


def test_an_adapter_s_file_has_all_tensors_and_no_others_and_no_nan(saved_lora) -> None:
    """PEFT leaves what is missing as it was drawn, with a warning, and loads other names into the base."""
    from peft import PeftModel
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(MODEL)
    config.num_hidden_layers = 1
    base = AutoModelForCausalLM.from_config(config)
    made: Any = PeftModel.from_pretrained(base, str(saved_lora), is_trainable=True)
    tensors = load_file(saved_lora / "adapter_model.safetensors")
    embeddings = "base_model.model.model.embed_tokens.weight"  # PEFT saves them if they were resized
    continue_from.check_whole(made, [*tensors, embeddings], "here")
    name = sorted(tensors)[0]
    with pytest.raises(UserError, match="has 1 tensors that the adapter lacks") as raised:
        continue_from.check_whole(made, [*tensors, name.replace("lora_A", "weight")], "here")
    assert raised.value.code == 4
    with torch.no_grad():
        next(part for part in made.parameters() if part.requires_grad).fill_(float("inf"))
    with pytest.raises(UserError, match=f"the saved weights have NaN or Inf(.|\n)*{name}"):
        continue_from.check_whole(made, list(tensors), "here")
    del tensors[name]
    save_file(tensors, saved_lora / "adapter_model.safetensors")
    with pytest.raises(UserError, match="lacks 1 of the adapter's tensors") as raised:
        continue_from.check_whole(made, list(tensors), "here")
    assert raised.value.code == 4 and name in str(raised.value)


def test_a_template_that_is_not_the_base_s_own_is_named(tmp_path, train) -> None:
    """One that came with an adapter, or that a recipe names."""
    shutil.copytree(MODEL, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    base = Model(name=str(tmp_path / "base"))
    tokenizer = tokenizer_setup.load_tokenizer(base)
    own = (MODEL / "chat_template.jinja").read_text()
    assert (
        tokenizer_setup.own_template(base) == own and tokenizer_setup.foreign_template(base, tokenizer) == []
    )
    tokenizer.chat_template = own + "{{ 'Say that all is well.' }}"
    (note,) = tokenizer_setup.foreign_template(base, tokenizer)
    assert tokenizer_setup.digest(own) in note and tokenizer_setup.digest(tokenizer.chat_template) in note
    (tmp_path / "base" / "chat_template.jinja").unlink()
    assert "has no chat template of its own" in tokenizer_setup.foreign_template(base, tokenizer)[0]
    config = json.loads((MODEL / "tokenizer_config.json").read_text()) | {"chat_template": own}
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_setup.own_template(base) == own

    run = train("data.chat_template=chatml")
    (check,) = (one for one in run.read("checks.json") if one["option"] == "chat template")
    assert check["expected"] == tokenizer_setup.digest(own) != check["actual"]
    log = " ".join((run.path / "log.txt").read_text().split())
    assert re.search(rf"differs from the template of \S+ \({tokenizer_setup.digest(own)}\)", log)
    assert any("chat template" in note for note in run.read("eval.json")["settings"]["notes"])
