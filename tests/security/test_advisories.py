"""Attacks that other toolkits fell to, each test named after its advisory, each with a real artifact.

Every attack writes the file `canary` when it succeeds. Not here, because nothing of ours is like it:

- CVE-2023-48022 (ray's job API, without a login): no ray, and nothing of ours listens.
- ZDI-CAN-28091, ZDI-CAN-29214, CVE-2024-43497 (DeepSpeed, details not public): no DeepSpeed checkpoint is
  read or written; runs under DeepSpeed go on from ours, which are tensors and JSON.
- CVE-2026-1839 and CVE-2024-3568 as they were (torch < 2.6, TensorFlow) can't happen on torch >= 2.11; what
  they teach, that *every* file of a checkpoint is a way in, is tested under their names.
"""

import contextlib
import io
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.adapters import continue_from
from finetune.autoconfig import machine_setup
from finetune.checkpointing import checkpoints
from finetune.cli import main
from finetune.core import untrusted_files, verified_files
from finetune.core.errors import UserError
from finetune.data import template_sandbox
from finetune.hub import client
from finetune.models import loading, model_files, tokenizer_setup
from finetune.recipe.schema import Model
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder
from support.hub_server import Hub
from support.paths import DATA, MODEL, QUICKSTART, ROOT
from support.rejected import refused

EVIL_KERNEL = "evil-org/evil-kernel"
EVIL_CODE = "import pathlib; pathlib.Path({canary!r}).touch()\n"


class Poison:
    """Touches the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path) -> Any:
    """The file that no attack may make."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "the attack succeeded"


def edit(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | entries))


def poison(path: Path, canary: Path) -> None:
    """A file that runs code when it is loaded without care: plain, or in torch's archive."""
    if path.suffix in (".bin", ".pt", ".pth"):
        torch.save({"weight": Poison(canary)}, path)
    else:
        path.write_bytes(pickle.dumps(Poison(canary)))


def opened_by_us(folder: Path) -> Any:
    """The model as a run loads it."""
    asked = Model(name=str(folder))
    setup = machine_setup.choose(attention="auto", base="auto", adapter_type="lora")
    return loading.load(asked, setup, "cpu")


def test_the_poison_works(tmp_path) -> None:
    """Else no test here could fail."""
    for number, name in enumerate(("a.pkl", "b.bin")):
        poison(tmp_path / name, tmp_path / str(number))
        if name.endswith("bin"):
            torch.load(tmp_path / name, weights_only=False)
        else:
            pickle.loads((tmp_path / name).read_bytes())
        assert (tmp_path / str(number)).is_dir()


@pytest.mark.parametrize(
    "entries",
    [
        {"_attn_implementation_internal": EVIL_KERNEL},
        {"_attn_implementation": EVIL_KERNEL},
        {"attn_implementation": EVIL_KERNEL},
        {"attn_implementation": f"flash_attention_2|{EVIL_KERNEL}:function"},
        {"attn_implementation": {"": "sdpa", "text_config": EVIL_KERNEL}},
        {"experts_implementation": EVIL_KERNEL},
        {"text_config": {"_attn_implementation_internal": EVIL_KERNEL}},
    ],
)
def test_cve_2026_4372_a_config_names_no_kernel(entries: dict, weightless, capsys) -> None:
    edit(weightless / "config.json", **entries)
    refused(weightless, capsys, says=("names a kernel", "config.json", "evil-org", "model.attention"))
    with pytest.raises(UserError, match="names a kernel"):
        model_files.read_config(Model(name=str(weightless)))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_cve_2026_5241_an_artifact_does_not_trust_itself(file: str, weightless, capsys) -> None:
    edit(weightless / file, inner={"trust_remote_code": True})
    refused(weightless, capsys, says=("asks to run code of the model", file))


@pytest.mark.parametrize("known", [True, False], ids=["known type", "unknown type"])
@pytest.mark.parametrize("cve", ["CVE-2026-22807", "CVE-2026-4944", "Megatron-Bridge-3137-3506"])
def test_cve_2026_22807_cve_2026_4944_code_of_a_repository_never_runs(
    cve: str, known: bool, weightless, canary, monkeypatch
) -> None:
    """vLLM ran `auto_map`'s modules unasked, or with the answer hard-coded. Here not even a yes helps."""
    code = EVIL_CODE.format(canary=str(canary))
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py"):
        (weightless / name).write_text(f"{code}class Evil: pass\n")
    maps = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    if cve == "CVE-2026-4944":
        maps = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    if cve.startswith("Mega"):
        maps = {key: f"evil-org/evil--{value}" for key, value in maps.items()}
    entries = {} if known else {"model_type": "evil", "architectures": ["Evil"]}
    edit(weightless / "config.json", auto_map=maps, **entries)
    edit(weightless / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))  # transformers asks at the terminal
    asked = Model(name=str(weightless))
    if known:
        assert model_files.read_config(asked).model_type == "llama"
        assert len(tokenizer_setup.load_tokenizer(asked)) > 100
    else:
        with pytest.raises(
            UserError, match=r"its own Python code|can't load the model in this folder"
        ) as raised:
            model_files.read_config(asked)
        assert raised.value.code == 2
    assert sys.stdin.read() == "y\n" * 9, "no question was asked"


def test_a_repository_on_the_hub_is_looked_at_like_a_folder(hub: Hub, canary, tmp_path) -> None:
    """CVE-2026-4372, CVE-2026-22807, transformers 46482 and a traversal, from where they come from."""
    config = (MODEL / "config.json").read_bytes()
    evil = json.dumps({**json.loads(config), "attn_implementation": EVIL_KERNEL}).encode()
    torch.save({"weight": Poison(canary)}, tmp_path / "evil.bin")
    bin_file = (tmp_path / "evil.bin").read_bytes()
    index = json.dumps({"weight_map": {"a": "../victim/model.safetensors"}}).encode()
    unknown = {**json.loads(config), "model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    for name, files, says in (
        ("kernel", {"config.json": evil}, "names a kernel"),
        ("index", {"config.json": config, untrusted_files.INDEX: index}, "outside of its folder"),
        ("adapter", {"config.json": config, "adapter_config.json": b"{}"}, "is an adapter"),
        (
            "code",
            {"config.json": json.dumps(unknown).encode(), "evil.py": b"1/0"},
            "brings its own Python code",
        ),
        ("weights", {"config.json": config, "pytorch_model.bin": bin_file}, "only in pickles"),
    ):
        hub.add(f"me/{name}", **files)
        asked = Model(name=f"me/{name}")
        with pytest.raises(UserError, match=says) as raised:
            model_files.read_config(asked)
            opened_by_us(Path(asked.name))
        assert raised.value.code == 2
    assert not hub.asked("convert") and not hub.asked("discussions"), "no one is asked to convert it"


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "flax_model.msgpack"]
)
def test_cve_2024_3568_pickled_weights_are_not_opened(name: str, weightless, canary, capsys) -> None:
    poison(weightless / name, canary)
    refused(weightless, capsys, says=("only in pickles", name, "safetensors", "convert"))
    with pytest.raises(UserError, match="only in pickles"):
        opened_by_us(weightless)


SLOTS = {  # advisory -> files beside those of a checkpoint
    "CVE-2026-1839": ("rng_state.pth", "rng_state_0.pth", "rng.pkl"),
    "CVE-2024-3568": (
        *("optimizer.pt", "scheduler.pt", "scaler.pt", "optimizer.bin", "custom_checkpoint_0.pkl"),
    ),
    "CVE-2026-24152": (".metadata", "common.pt", "mp_rank_00_model_states.pt"),
    "Megatron-Bridge-3506": ("train_state.pt", "training_args.bin", "adapter_model.bin"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first of two steps."""
    folder = tmp_path_factory.mktemp("stopped")
    rows = (DATA / "train.jsonl").read_text().splitlines()[:16]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    assert main.main([*command(folder), "--until=1"]) == 75
    return folder


def command(folder: Path) -> list[str]:
    short = ["train.max_steps=2", "train.warmup_steps=0", "train.effective_batch_size=2"]
    short += ["eval.forgetting=false"]
    short += [f"data.name={folder / 'rows.jsonl'}", "data.validation=null", "data.expect.duplicates=1"]
    return ["train", str(QUICKSTART), *short, f"train.output_dir={folder / 'run'}", "--quiet"]


def test_cve_2026_1839_no_file_of_a_checkpoint_is_unpickled(stopped, canary, tmp_path) -> None:
    """Poison in every place where a Trainer, Accelerate, DCP, DeepSpeed or Megatron would look."""
    shutil.copytree(stopped, tmp_path / "copy")
    run = RunFolder(tmp_path / "copy" / "run")
    (step,) = checkpoints.published(run.checkpoints)
    for names in SLOTS.values():
        for name in names:
            for place in (step, run.checkpoints, run.path, run.path / "checkpoints" / ".staging"):
                place.mkdir(exist_ok=True)
                poison(place / name, canary)
    assert main.main([*command(tmp_path / "copy"), "--resume", f"data.name={stopped / 'rows.jsonl'}"]) == 0
    assert run.finished and run.read("checks.json")
    ours = [path for path in run.adapter.rglob("*") if path.suffix in untrusted_files.PICKLES]
    assert not ours, "and none is written"


@pytest.mark.parametrize("advisory", SLOTS)
def test_cve_2026_24152_a_manifest_names_no_pickle(advisory: str, canary, tmp_path) -> None:
    path = checkpoints.write(tmp_path, 1, {"state.json": {}}, None)
    for name in SLOTS[advisory]:
        poison(path / name, canary)
        name_in_manifest(path, name, path / name)
        with pytest.raises(checkpoints.Damaged, match="not a file of a checkpoint"):
            checkpoints.verify(path)


def name_in_manifest(path: Path, name: str, file: Path) -> None:
    """A manifest that is whole, and names one more file of a checkpoint, with its true size and hash."""
    said = {"bytes": file.stat().st_size, "sha256": client.sha256(file)}
    files = {**checkpoints.read_json(path, checkpoints.MANIFEST)["files"], name: said}
    changed = {"format": checkpoints.FORMAT, "step": 1, "files": files}
    (path / checkpoints.MANIFEST).write_text(verified_files.signed(changed))


def test_cve_2025_32434_cve_2026_24747_torch_is_new_enough() -> None:
    """`weights_only` was broken before 2.6 and before 2.10; no file is unpickled: test_unsafe_calls."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.version import Version

    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch_needed,) = (Requirement(line) for line in needed if Requirement(line).name == "torch")
    assert not torch_needed.specifier.contains("2.9.1") and torch_needed.specifier.contains("2.11")
    assert Version(torch.__version__.partition("+")[0]) >= Version("2.10")


@pytest.mark.parametrize(
    "entries",
    [
        {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil_module"}},
        {"auto_mapping": {"base_model_class": "Evil", "parent_library": "transformers_evil"}},
        {"auto_mapping": "evil_module"},
        {"auto_mapping": ["transformers.models"]},
        {"megatron_config": {"a": 1}, "megatron_core": "evil_module"},
    ],
)
def test_peft_3085_3090_an_adapter_imports_nothing(
    entries: dict, saved_lora, canary, capsys, monkeypatch, tmp_path
) -> None:
    for name in ("evil_module", "transformers_evil"):
        (tmp_path / "path").mkdir(exist_ok=True)
        (tmp_path / "path" / f"{name}.py").write_text(EVIL_CODE.format(canary=str(canary)))
    monkeypatch.syspath_prepend(tmp_path / "path")
    edit(saved_lora / "adapter_config.json", **entries)
    refused(
        saved_lora,
        capsys,
        says=("names a Python module to import", "adapter_config.json"),
        key="adapter.init_from",
    )
    (tmp_path / "run" / "adapter").parent.mkdir()
    shutil.copytree(saved_lora, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "recipe.resolved.yaml").write_text(QUICKSTART.read_text())
    with pytest.raises(UserError, match="names a Python module"):  # evaluate, merge, chat, publish, compare
        run_folder.open_run(tmp_path / "run")


def test_peft_2888_2896_a_tokenizer_of_an_adapter_is_not_trusted(saved_lora, capsys) -> None:
    edit(saved_lora / "adapter_config.json", tokenizer_kwargs={"trust_remote_code": True})
    refused(
        saved_lora,
        capsys,
        says=("asks to run code of the model", "adapter_config.json"),
        key="adapter.init_from",
    )


def test_transformers_46482_a_model_s_folder_brings_no_adapter(weightless, capsys) -> None:
    """transformers would load the base that the adapter's config names, in place of this model."""
    edit(weightless / "adapter_config.json", peft_type="LORA", base_model_name_or_path="evil-org/evil")
    refused(weightless, capsys, says=("holds a model and an adapter",))
    with pytest.raises(UserError, match="a model and an adapter"):
        opened_by_us(weightless)


@pytest.mark.parametrize("name", ["adapter_model.bin", "value_head.bin"])
def test_cve_2025_53002_a_value_head_is_not_unpickled(name: str, saved_lora, canary, capsys) -> None:
    poison(saved_lora / name, canary)
    if name == "adapter_model.bin":
        (saved_lora / "adapter_model.safetensors").unlink()
        refused(saved_lora, capsys, says=("only in pickles", name), key="adapter.init_from")
    else:
        continue_from.check_weights(saved_lora, str(saved_lora))
        from peft.utils import load_peft_weights

        assert load_peft_weights(str(saved_lora), device="cpu"), "the safetensors are what is read"


def test_cve_2024_52803_names_reach_no_shell(canary, capsys, tmp_path, monkeypatch) -> None:
    """The commands that are printed and run are lists of words (no shell anywhere: test_unsafe_calls)."""
    monkeypatch.chdir(tmp_path)
    for name in (f"$(mkdir {canary})", f"a; mkdir {canary}", f"`mkdir {canary}`", f"| mkdir {canary}"):
        for key in ("model.name", "data.name", "adapter.init_from", "eval.forgetting"):
            main.main(["check", str(QUICKSTART), f"{key}={json.dumps(name)}"])
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "scheme", ["{}/rows.jsonl", "file:///etc/hostname", "hf://datasets/a/b.jsonl", "ftp://a/b"]
)
def test_ghsa_fcm9_7xcw_g9xp_no_address_is_fetched(scheme: str, hub: Hub, capsys) -> None:
    """Data come from files and from the Hub by id; there is no fetching of addresses to be led astray."""
    for key in (
        "data.name",
        "data.validation",
        "data.chat_template",
        "eval.forgetting",
        "model.name",
        "adapter.init_from",
    ):
        before = len(hub.requests)
        assert main.main(["check", str(QUICKSTART), f"{key}={scheme.format(hub.endpoint)}"]) == 2
        assert len(hub.requests) == before and key in capsys.readouterr().err


TEMPLATES = {
    "CVE-2024-34359": (
        "{% for x in ().__class__.__base__.__subclasses__() %}{% if 'warning' in x.__name__ %}"
        "{{ x()._module.__builtins__['__import__']('os').popen('mkdir CANARY').read() }}"
        "{% endif %}{% endfor %}"
    ),
    "CVE-2026-5760": ("{{ self.__init__.__globals__.__builtins__.__import__('os').system('mkdir CANARY') }}"),
    "cycler": "{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_cve_2024_34359_cve_2026_5760_a_template_is_in_a_sandbox(name: str, canary) -> None:
    """Time and memory are limited too: tests/security/test_template_sandbox.py."""
    template = TEMPLATES[name].replace("CANARY", str(canary))
    chats = [([{"role": "user", "content": "Who came?"}], None)]
    (found,) = template_sandbox.render(template_sandbox.ChatTemplate(template, {}), chats)
    assert found.error or "os" not in found.text


def test_cve_2026_31253_data_files_are_not_unpickled(canary, tmp_path, capsys) -> None:
    for name in ("rows.pkl", "rows.pt", "rows.npy", "rows.bin", "rows.jsonl"):
        poison(tmp_path / name, canary)
        key = "data.name"
        assert main.main(["data", str(QUICKSTART), f"{key}={tmp_path / name}", "data.validation=null"]) == 2
        error = capsys.readouterr().err
        assert "can run code" in error or "rows.jsonl" in error


@pytest.mark.parametrize(
    "name",
    ["../../secret.json", "../secret.safetensors", "/etc/hostname", "file:../secret.json", "..\\secret.json"],
)
def test_cve_2023_1177_cve_2023_2356_no_name_leads_out_of_its_folder(name: str, tmp_path) -> None:
    """MLflow's servers read any file that a model's source named by `../`. Here a checkpoint's manifest does,
    and whoever asks for a checkpoint; indices and links of models: tests/security/test_untrusted_files.py."""
    path = checkpoints.write(tmp_path / "checkpoints", 1, {"state.json": {}}, None)
    (tmp_path / "secret.json").write_text("{}")
    name_in_manifest(path, name, tmp_path / "secret.json")
    with pytest.raises(checkpoints.Damaged, match="not a file of a checkpoint"):
        checkpoints.verify(path)
    with pytest.raises(UserError, match="the checkpoint does not exist"):
        checkpoints.named(path.parent, f"step-1/{name}")


def test_cve_2023_6730_no_vocabulary_or_index_is_unpickled(weightless, canary) -> None:
    """transformers opened Transformer-XL's vocabulary, and the index of a retriever, by pickle."""
    for name in ("vocab.pkl", "hf_bert_base.hnswSQ8_correct_phi_128.c_index.index_meta.dpr"):
        poison(weightless / name, canary)
    edit(weightless / "tokenizer_config.json", tokenizer_class="TransfoXLTokenizer")
    for kind in ("transfo-xl", "rag", "llama"):
        edit(weightless / "config.json", model_type=kind)
        with contextlib.suppress(UserError):
            tokenizer_setup.load_tokenizer(Model(name=str(weightless)))
        with pytest.raises(UserError):
            opened_by_us(weightless)


def test_cve_2026_2614_nothing_of_ours_listens() -> None:
    """MLflow's tracking servers gave files away. Reports are files; trackers are clients, off unless asked
    for (that no module of ours imports a server: test_unsafe_calls)."""
    from finetune.recipe.loader import load

    assert load(QUICKSTART).train.passed_on().get("report_to", "none") in ("none", [], None)


@pytest.mark.parametrize(
    "text",
    [
        "env: {HF_ENDPOINT: http://evil}\n",
        "model: {name: !!python/object/apply:os.mkdir [CANARY]}\n",
        "model: {name: !ENV x}\n",
        "a: &a [x, x]\n" + "".join(f"a{i}: &b{i} [*a, *a, *a, *a]\n" for i in range(30)),
        "model: {_target_: os.mkdir}\n",
        "<<: {model: {name: x}}\n",
    ],
)
def test_trl_scripts_utils_a_recipe_sets_no_environment_and_runs_nothing(
    text: str, canary, tmp_path, capsys
) -> None:
    before = dict(os.environ)
    (tmp_path / "evil.yaml").write_text(text.replace("CANARY", str(canary)))
    assert main.main(["check", str(tmp_path / "evil.yaml")]) == 2
    assert dict(os.environ) == before and "evil.yaml:" in capsys.readouterr().err
