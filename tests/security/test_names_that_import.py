"""Names in recipes, models and adapters that could become an import, a script or a download.

Each name is that of a module that lies on the path of this process and beside the file that names it.
The module makes a canary when it is imported. Each request of the network is recorded and refused.
"""

import importlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.adapters import attach
from finetune.autoconfig import machine_setup
from finetune.cli import main
from finetune.core import untrusted_files
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.evaluation import task_guard
from finetune.models import loading, model_files, tokenizer_setup
from finetune.recipe import loader
from finetune.recipe.schema import Model
from support.paths import QUICKSTART, ROOT

MODULE, NAME = "evil_module", "evil_module.Evil"


@pytest.fixture
def evil(tmp_path, monkeypatch, no_network) -> Any:
    """A folder with the module; afterwards nothing was imported, asked or fetched."""
    folder, canary = tmp_path / "path", tmp_path / "canary"
    folder.mkdir()
    plant(folder, canary)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))  # transformers asks at the terminal
    yield folder
    assert not canary.exists() and MODULE not in sys.modules, "a name was imported"
    assert not no_network, "a name was fetched"
    assert sys.stdin.read() == "y\n" * 9, "a question was asked"


def plant(folder: Path, canary: Path) -> None:
    code = f"import pathlib\npathlib.Path({str(canary)!r}).touch()\nclass Evil: pass\n"
    for name in (MODULE, "evil", "modeling_evil", "tokenization_evil", "configuration_evil"):
        (folder / f"{name}.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)


def test_planted_module_makes_the_canary(tmp_path, monkeypatch) -> None:
    """Else no test here could fail."""
    (tmp_path / "path").mkdir()
    plant(tmp_path / "path", tmp_path / "canary")
    monkeypatch.syspath_prepend(tmp_path / "path")
    importlib.import_module(MODULE)
    del sys.modules[MODULE]
    assert (tmp_path / "canary").exists()


CORDA = ["adapter.init_lora_weights=corda"]
TEXT = [
    "adapter.type=prompt_tuning",
    "adapter.prompt_tuning_init=TEXT",
    "adapter.prompt_tuning_init_text=hello",
    "adapter.num_virtual_tokens=4",
]
RECIPES: list[tuple[str, str, list[str]]] = [  # key, value, other overrides
    ("train.optim", NAME, []),
    ("train.lr_scheduler_type", NAME, []),
    ("train.lr_scheduler_kwargs", f'{{"class": "{NAME}"}}', []),
    ("train.torch_compile_backend", MODULE, []),
    ("train.deepspeed", "evil.json", []),
    ("train.accelerator_config", "evil.json", []),
    ("train.model_init_kwargs", "{trust_remote_code: true}", []),
    ("train.trust_remote_code", "true", []),
    ("train.liger_kernel_config", f"{{{MODULE}: true}}", []),
    ("train.ddp_backend", MODULE, []),
    ("train.chat_template_path", MODULE, []),
    ("model.attention", "evil-org/kernel", []),
    ("model.attention", "kernels-community/flash-attn3", []),
    ("model.quantization", NAME, []),
    ("model.quantization", "{quant_method: evil_module}", []),
    ("speed.compile", MODULE, []),
    ("speed.loss", NAME, []),
    ("speed.qat", f"{{config: {NAME}}}", []),
    ("adapter.type", MODULE, []),
    ("adapter.type", "xlora", []),
    ("adapter.init_lora_weights", NAME, []),
    ("adapter.auto_mapping", f"{{parent_library: {MODULE}}}", []),
    ("adapter.megatron_core", MODULE, []),
    ("adapter.corda_config.cache_file", "evil.pt", CORDA),
    ("adapter.corda_config.covariance_file", "evil.pt", CORDA),
    ("adapter.lora_ga_config", "{cache_file: evil.pt}", ["adapter.init_lora_weights=lora_ga"]),
    ("adapter.tokenizer_name_or_path", "evil-org/evil", TEXT),
    ("adapter.tokenizer_kwargs", "{trust_remote_code: true}", TEXT),
    ("adapter.tokenizer_kwargs", "{tokenizer_file: /etc/hosts}", TEXT),
    ("data.format", MODULE, []),
    ("eval.engine", MODULE, []),
]


@pytest.mark.parametrize(
    ("key", "value", "more"), RECIPES, ids=[f"{key}={value}" for key, value, _ in RECIPES]
)
def test_recipe_names_no_module_script_or_repository(key: str, value: str, more: list[str], evil) -> None:
    with pytest.raises(UserError) as raised:
        loader.load(QUICKSTART, [*more, f"{key}={value}"])
    assert raised.value.code == 2 and any(one.key.startswith(key) for one in raised.value.problems)


def test_tokenizer_of_a_prompt_may_be_the_model_itself() -> None:
    """Also in the resolved recipe of a run, whose model is an absolute path."""
    path = loader.load(QUICKSTART).model.name
    named = [*TEXT, "data.packing=false", f"adapter.tokenizer_name_or_path={path}"]
    assert loader.load(QUICKSTART, named).adapter.type == "prompt_tuning"
    assert loader.load(QUICKSTART, [*named, f"model.name={ROOT / path}"]).adapter.type == "prompt_tuning"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.report_to", MODULE),
        ("data.name", "webdataset"),
        ("data.name", "evil_module.py"),
        ("data.name", "http://127.0.0.1:9/x.jsonl"),
        ("data.name", "hf://datasets/evil/x/a.jsonl"),
        ("data.validation", "http://127.0.0.1:9/x.jsonl"),
        ("data.chat_template", MODULE),
        ("data.chat_template", "http://127.0.0.1:9/x.jinja"),
    ],
)
def test_check_refuses_a_name_that_is_no_tracker_file_or_id(key: str, value: str, evil, capsys) -> None:
    assert main.main(["check", str(QUICKSTART), f"{key}={value}"]) == 2
    assert f"error: {key}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", [MODULE, "evil_module.py", "evil.json", "./evil", "/etc/passwd", "*", NAME])
def test_name_of_a_task_is_not_a_path(name: str, evil, monkeypatch) -> None:
    """lm-eval reads a name that it does not know as the path of a file, with `!function`."""
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(evil)
    (evil / "evil.json").write_text("task: evil\nprocess_docs: !function evil.run\n")
    with pytest.raises(UserError, match="no such task"):
        task_guard.load(TaskManager(include_defaults=False), [name])


CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer_config.json", "generation_config.json"
MODELS: list[tuple[str, dict[str, Any]]] = [
    (CONFIG, {"model_type": NAME}),
    (CONFIG, {"model_type": "timm_wrapper", "architecture": "hf_hub:evil-org/evil"}),
    (CONFIG, {"architectures": [NAME]}),
    (CONFIG, {"dtype": NAME}),
    (CONFIG, {"dtype": "load"}),
    (CONFIG, {"quantization_config": {"quant_method": MODULE}}),
    (
        CONFIG,
        {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {"_type": NAME}}}},
    ),
    (CONFIG, {"quantization_config": {"quant_method": "gptq", "bits": 4, "tokenizer": "evil-org/evil"}}),
    (CONFIG, {"quantization_config": {"quant_method": "quark", "config": NAME}}),
    (CONFIG, {"backbone": "evil-org/evil", "use_pretrained_backbone": True}),
    (CONFIG, {"hidden_act": NAME}),
    (CONFIG, {"rope_scaling": {"rope_type": NAME}}),
    (CONFIG, {"text_config": {"model_type": NAME}}),
    (CONFIG, {"tokenizer_class": NAME}),
    (CONFIG, {"kernel_config": {"kernel_mapping": {"RMSNorm": "evil-org/evil:Evil"}}, "use_kernels": True}),
    (CONFIG, {"experts_implementation": MODULE}),
    (CONFIG, {"attn_implementation": MODULE}),
    (CONFIG, {"_name_or_path": "evil-org/evil", "name_or_path": "evil-org/evil"}),
    (CONFIG, {"transformers_weights": "../evil.safetensors"}),
    (CONFIG, {"custom_pipelines": {"x": {"impl": "evil.Evil"}}}),
    (CONFIG, {"tie_word_embeddings": NAME}),
    (TOKENIZER, {"tokenizer_class": NAME}),
    (TOKENIZER, {"tokenizer_class": "AutoModel"}),
    (TOKENIZER, {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
    (TOKENIZER, {"tokenizer_class": "RagTokenizer"}),
    (
        TOKENIZER,
        {"tokenizer_class": "BertJapaneseTokenizer", "mecab_kwargs": {"mecab_option": "-r /etc/hosts"}},
    ),
    (TOKENIZER, {"processor_class": NAME, "backend": NAME}),
    (TOKENIZER, {"tokenizer_object": NAME}),
    (TOKENIZER, {"name_or_path": "evil-org/evil", "tokenizer_file": "/etc/hosts"}),
    (TOKENIZER, {"added_tokens_decoder": {"0": {"content": "x", "__type": NAME}}}),
    (GENERATION, {"custom_generate": "evil-org/evil"}),
    (GENERATION, {"cache_implementation": NAME}),
    (GENERATION, {"assistant_model": "evil-org/evil"}),
    (GENERATION, {"watermarking_config": {"class": NAME}}),
    (GENERATION, {"compile_config": {"backend": MODULE}}),
    ("processor_config.json", {"processor_class": NAME, "auto_map": {"AutoProcessor": "evil.Evil"}}),
    ("preprocessor_config.json", {"image_processor_type": NAME}),
    ("special_tokens_map.json", {"bos_token": {"__type": NAME}}),
    ("added_tokens.json", {"x": NAME}),
]


@pytest.mark.parametrize(
    ("file", "entries"), MODELS, ids=[f"{file} {entries}"[:90] for file, entries in MODELS]
)
def test_model_s_files_name_no_module_script_or_repository(
    file: str, entries: dict[str, Any], evil, two_layers, tmp_path
) -> None:
    """Each loads as what it is, or is refused."""
    folder = tmp_path / "model"
    shutil.copytree(two_layers, folder)
    plant(folder, tmp_path / "canary")
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **entries}))
    asked = Model(name=str(folder))
    try:
        model_files.read_config(asked)
        tokenizer = tokenizer_setup.load_tokenizer(asked)
        setup = machine_setup.choose(attention="auto", base="auto", adapter_type="lora")
        model = loading.load(asked, setup, "cpu")
    except UserError as error:
        assert error.code in (2, 3) and "model.name" in str(error)
        return
    assert type(model).__module__.startswith("transformers.") and "evil" not in type(tokenizer).__name__
    ids = tokenizer("a", return_tensors="pt")
    generator: Any = model
    generator.generate(**ids, max_new_tokens=1, do_sample=False)


ADAPTERS: list[dict[str, Any]] = [
    {"auto_mapping": {"base_model_class": "Evil", "parent_library": MODULE}},
    {"megatron_config": {"a": 1}, "megatron_core": MODULE},
    {"tokenizer_name_or_path": "evil-org/evil"},
    {"tokenizer_kwargs": {"trust_remote_code": True}},
    {"tokenizer_kwargs": {"tokenizer_file": "/etc/hosts"}},
    {"prompt_tuning_init_state_dict_path": "evil.pt"},
    {"peft_type": "XLORA", "adapters": {"0": "evil-org/evil"}},
]


@pytest.mark.parametrize("entries", ADAPTERS, ids=str)
def test_adapter_s_config_names_no_module_script_or_repository(entries, evil, saved_lora, capsys) -> None:
    path = saved_lora / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    assert main.main(["check", str(QUICKSTART), f"adapter.init_from={saved_lora}"]) == 2
    said = capsys.readouterr().err
    assert "adapter.init_from" in said and "adapter_config.json" in said


def test_prompt_of_another_model_s_tokenizer_is_not_continued(evil, two_layers, tmp_path) -> None:
    """PEFT fetches the tokenizer that a prompt's config names where the prompt goes on to train."""
    from peft import PromptTuningConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    asked = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(two_layers), asked)
    made.save_pretrained(str(tmp_path / "prompt"))
    path = tmp_path / "prompt" / "adapter_config.json"
    text = {
        "prompt_tuning_init": "TEXT",
        "prompt_tuning_init_text": "a",
        "tokenizer_name_or_path": "evil-org/evil",
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **text}))
    with pytest.raises(UserError, match="names files outside of its folder"):
        untrusted_files.check_adapter(tmp_path / "prompt", "adapter.init_from")


def test_tokenizer_of_a_prompt_is_read_from_the_model_s_folder(
    evil, two_layers, tmp_path, monkeypatch
) -> None:
    """A resolved recipe may name it by a path that another folder has too."""
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    recipe = loader.load(
        QUICKSTART,
        [
            *TEXT,
            "data.packing=false",
            f"model.name={two_layers}",
            f"adapter.tokenizer_name_or_path={two_layers.name}",
        ],
    )
    model = AutoModelForCausalLM.from_pretrained(two_layers)
    adapted: Any = attach.attach(model, recipe.adapter, 1, RunChecks())
    assert adapted.peft_config["default"].tokenizer_name_or_path == str(two_layers)
