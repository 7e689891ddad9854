"""`finetune export`: whole runs, for several servers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.cli import main
from finetune.core import packages
from finetune.evaluation import reopen
from finetune.export import export_source
from finetune.quantization.fp8_linear import Fp8Linear
from finetune.recipe import loader
from support.paths import MODEL
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune.run_folder.run_folder import RunFolder
    from support.hub_server import Hub

needs_gguf = pytest.mark.skipif(
    not packages.installed("gguf"), reason="needs the package gguf (extra `export`)"
)

needs_compressed_tensors = pytest.mark.skipif(
    not packages.installed("compressed_tensors"), reason="needs compressed-tensors (extra `export`)"
)


def export(run: RunFolder, *options: str, code: int = 0) -> dict[str, Any]:
    """The report of an export in the run folder, or an empty one."""
    assert main.main(["export", str(run.path), *options, "--quiet"]) == code
    reports = run.found("export.json")
    return list(reports.values())[-1] if reports else {}


@needs_gguf
def test_export_to_gguf_of_a_run_compares_ids_and_answers(
    trained: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained()
    assert main.main(["export", str(run.path), "--to", "gguf", "--quantize", "q8_0", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    report = printed["result"]
    folder = run.path / "export-gguf-q8_0"
    assert printed["command"] == "export" and set(report["files"]) < {p.name for p in folder.iterdir()}
    check = report["serving_check"]
    assert check["reader"] and check["answers"]["agree"] and not check["stop_tokens"]["missing"]
    assert check["token_ids"].get("different", 0) == 0
    assert json.loads((folder / "export.json").read_text())["path"] == str(folder)
    assert report["against_tuned"]["relative"] < 0.01
    assert (
        check["loss"]["agree"] and "gguf, q8_0 (export-gguf-q8_0)" in (run.path / "report.html").read_text()
    )


@needs_gguf
def test_export_of_an_adapter_to_gguf_has_the_update_of_each_weight(
    trained: Callable[..., RunFolder],
) -> None:
    import gguf

    from finetune.export.gguf_families import in_pairs

    run = trained()
    assert export(run, "--to", "gguf", "--adapter", "--quantize", "q8_0", code=2) == {}
    report = export(run, "--to", "gguf", "--adapter")
    assert report["quantize"] == "as trained"
    (name,) = report["files"]
    reader = gguf.GGUFReader(run.path / "export-gguf-adapter" / name)
    held = {tensor.name: torch.tensor(tensor.data.copy()) for tensor in reader.tensors}
    weights = load_file(run.adapter / "adapter_model.safetensors")
    for module, stored, heads in (("q_proj", "attn_q", 8), ("k_proj", "attn_k", 4), ("v_proj", "attn_v", 0)):
        a, b = (weights[f"base_model.model.model.layers.0.self_attn.{module}.lora_{h}.weight"] for h in "AB")
        update = (b @ a).float()
        wanted = in_pairs(update, heads) if heads else update
        got = held[f"blk.0.{stored}.weight.lora_b"] @ held[f"blk.0.{stored}.weight.lora_a"]
        torch.testing.assert_close(got, wanted)
    assert len(held) == len(weights) and reader.get_field("adapter.lora.alpha").contents() == 32.0
    assert sorted(path.name for path in (run.path / "export-gguf-adapter").iterdir()) == ["export.json", name]
    assert export(trained("dora"), "--to", "gguf", "--adapter", code=2) == {}


@needs_gguf
@pytest.mark.parametrize("kind", soak_except(["rslora"], ["lora", "rslora"]))
def test_gguf_lora_answers_in_llama_cpp_as_the_fine_tuned_model(
    kind: str, trained: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.export import gguf_lora, gguf_readers

    run = trained(kind)
    if not gguf_readers.has_llama_cpp():
        check = export(run, "--to", "gguf", "--adapter")["serving_check"]
        assert check["reader"] is None and "llama.cpp is not installed" in check["not_run"]
        return
    entries = gguf_lora.entries

    def twice(*values: Any) -> dict[str, Any]:
        found = entries(*values)
        return found | {"adapter.lora.alpha": 2 * found["adapter.lora.alpha"]}

    with monkeypatch.context() as patched:
        patched.setattr(gguf_lora, "entries", twice)
        assert export(run, "--to", "gguf", "--adapter", code=4) == {}
    check = export(run, "--to", "gguf", "--adapter")["serving_check"]
    assert check["reader"].startswith("llama.cpp") and "tokenizer" in check["token_ids"]["not_run"]
    assert check["answers"]["agree"] and check["loss"]["agree"]


@needs_gguf
def test_export_to_ollama_writes_a_modelfile(trained: Callable[..., RunFolder]) -> None:
    run = trained()
    report = export(run, "--to", "ollama", "--quantize", "q8_0")
    text = (run.path / "export-ollama-q8_0" / "Modelfile").read_text()
    (name,) = report["files"]
    assert text.startswith(f'FROM ./{name}\nTEMPLATE """{{{{ range .Messages }}}}')
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert report["serving_check"]["template"] == {"chats": 3, "different": 0}


@needs_gguf
def test_export_to_gguf_of_full_fine_tuning_needs_no_merge(trained: Callable[..., RunFolder]) -> None:
    report = export(trained("full"), "--to", "gguf")
    assert "against_tuned" not in report and report["serving_check"]["answers"]["agree"]


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f32", torch.float32)])
def test_export_to_vllm_of_full_fine_tuning_has_the_named_dtype(
    kind: str, dtype: torch.dtype, trained: Callable[..., RunFolder]
) -> None:
    """Full fine-tuning saves its weights in fp32."""
    run = trained("full")
    report = export(run, "--to", "vllm", "--quantize", kind)
    assert report["quantize"] == kind and report["serving_check"]["answers"]["agree"]
    folder = run.path / f"export-vllm-{kind}"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {dtype}
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_export_to_vllm_merges_and_prints_how_to_serve(
    trained: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained()
    assert main.main(["export", str(run.path), "--to", "vllm"]) == 0
    printed = capsys.readouterr().out
    assert "vllm serve ." in printed and "sglang.launch_server" in printed and "OpenAI(" in printed
    folder = run.path / "export-vllm-bf16"
    check = json.loads((folder / "export.json").read_text())["serving_check"]
    assert check["token_ids"] == {"prompts": 3, "different": 0} and check["answers"]["agree"]
    generation = json.loads((folder / "generation_config.json").read_text())
    stops = generation["eos_token_id"]
    assert set(check["stop_tokens"]["expected"]) <= set(stops if isinstance(stops, list) else [stops])


def test_export_to_vllm_of_an_adapter_follows_the_rules_of_its_loader(
    trained: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    report = export(trained(), "--to", "vllm", "--adapter")
    assert "--max-lora-rank 16" in report["serve"][0] and "adapter_model.safetensors" in report["files"]
    assert report["serving_check"]["answers"]["agree"]
    assert export(trained("dora"), "--to", "vllm", "--adapter", code=2) == {}
    assert "DoRA" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["gguf", "mlx", "vllm", "compressed-tensors"])
def test_export_of_an_adapter_names_the_run_s_template_if_the_base_model_has_another(
    to: str, trained: Callable[..., RunFolder], tmp_path: Path
) -> None:
    """A server takes the template from the files of the base model."""
    needed = {"gguf": "gguf", "compressed-tensors": "compressed_tensors"}.get(to)
    if needed and not packages.installed(needed):
        pytest.skip(f"needs the package {needed}")
    run = trained()
    base = Path(shutil.copytree(MODEL, tmp_path / "base"))
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    report = export(run, f"model.name={base}", "--to", to, "--adapter")
    assert all(" --chat-template" in line and "chat_template.jinja" in line for line in report["serve"])
    assert "another chat template than the base model" in " ".join(report["notes"])
    assert "must end an answer at <|im_end|>" in " ".join(report["notes"])
    template = (run.path / f"export-{to}-adapter" / "chat_template.jinja").read_text()
    assert "<|im_start|>" in template and (to not in ("gguf", "mlx") or "{% generation" not in template)


def test_export_of_an_adapter_copies_no_file_that_it_does_not_know(trained: Callable[..., RunFolder]) -> None:
    run = trained()
    for name in ("evil.py", "id_rsa", "training_args.bin", "notes.txt"):
        (run.adapter / name).write_text("a stranger's")
    export(run, "--to", "vllm", "--adapter")
    names = {path.name for path in (run.path / "export-vllm-adapter").iterdir()}
    adapter = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"}
    assert names == adapter | {"tokenizer.json", "tokenizer_config.json", "export.json"}


@pytest.mark.soak
@needs_compressed_tensors
def test_export_to_compressed_tensors_of_a_run_on_an_fp8_base_model(
    trained: Callable[..., RunFolder],
) -> None:
    from safetensors.torch import load_file

    run, fp8 = trained(), "model.quantization=fp8"  # a CPU evaluates on an fp8 base model, but does not train
    merged = export(run, fp8, "--to", "compressed-tensors")
    assert merged["quantize"] == "fp8" and merged["serving_check"]["answers"]["agree"]
    report = export(run, fp8, "--to", "compressed-tensors", "--adapter")
    check = report["serving_check"]
    assert check["token_ids"]["different"] == 0 and check["answers"]["agree"] and check["loss"]["agree"]
    assert report["serve"][0].startswith("vllm serve base --enable-lora --max-lora-rank 16")
    weights = load_file(run.path / "export-compressed-tensors-adapter" / "base" / "model.safetensors")
    trained_on: Any = reopen.open_base(loader.load(run.recipe, [fp8]))
    layers = {name: one for name, one in trained_on.named_modules() if isinstance(one, Fp8Linear)}
    assert len(layers) == report["layers"]["quantized"] > 0
    for name, layer in layers.items():
        assert torch.equal(weights[f"{name}.weight"].float(), layer.weight.float()), name
        assert torch.equal(weights[f"{name}.weight_scale"], layer.weight_scale), name


def test_export_to_compressed_tensors_without_the_package_says_how_to_get_it(
    trained: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: name != "compressed_tensors")
    assert export(trained(), "--to", "compressed-tensors", code=3) == {}
    assert "[export]" in capsys.readouterr().err


def test_export_to_mlx_writes_a_folder_that_mlx_lm_loads(trained: Callable[..., RunFolder]) -> None:
    report = export(trained(), "--to", "mlx")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(report["files"])
    assert report["serving_check"]["answers"]["agree"] and "mlx_lm.server" in report["serve"][0]


@pytest.mark.soak
def test_export_of_a_plain_adapter_leaves_out_the_evaluation_and_says_so(
    trained: Callable[..., RunFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = Path(shutil.copytree(trained().adapter, tmp_path / "plain"))
    before = sorted(plain.iterdir())
    monkeypatch.chdir(tmp_path)
    base = f"model.name={MODEL}"
    assert main.main(["export", "plain", base, "--to", "vllm"]) == 0
    assert export_source.WITHOUT_RUN in " ".join(capsys.readouterr().out.split())
    folder = tmp_path / "plain-export-vllm-bf16"
    report = json.loads((folder / "export.json").read_text())
    check = report["serving_check"]
    assert check["token_ids"] == {"prompts": 50, "different": 0} and check["answers"]["agree"]
    assert check["loss"]["agree"] and report["against_tuned"]["relative"] < 0.5
    assert sorted(plain.iterdir()) == before
    for file in plain.glob("*token*"):
        file.unlink()  # as PEFT saves an adapter
    assert main.main(["export", "plain", base, "--to", "vllm", "--adapter", "--quiet"]) == 0
    files = {path.name for path in (tmp_path / "plain-export-vllm-adapter").iterdir()}
    assert "adapter_model.safetensors" in files and "tokenizer.json" not in files


def test_export_of_a_plain_adapter_names_what_it_lacks(
    trained: Callable[..., RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Path(shutil.copytree(trained().adapter, tmp_path / "plain"))
    config = json.loads((plain / "adapter_config.json").read_text())
    (plain / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone"}))
    assert main.main(["export", str(plain), "--to", "vllm"]) == 2
    assert "add model.name=PATH" in capsys.readouterr().err
    (plain / "adapter_model.safetensors").unlink()
    assert main.main(["export", str(plain), "--to", "vllm"]) == 2
    assert "no adapter_model.safetensors" in capsys.readouterr().err


def test_export_of_an_adapter_on_the_hub(
    hub: Hub,
    trained: Callable[..., RunFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter = trained().adapter
    files = {file.name: file.read_bytes() for file in adapter.iterdir() if file.name != "README.md"}
    hub.add("other/notes", private=False, **files)
    monkeypatch.chdir(tmp_path)
    base = f"model.name={MODEL}"
    assert main.main(["export", "other/notes", base, "--to", "vllm", "--adapter", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["result"]
    assert (tmp_path / "notes-export-vllm-adapter" / "adapter_model.safetensors").exists()
    commit = next(iter(hub.repos["other/notes"].commits))
    assert report["notes"][:2] == [
        f"other/notes is the adapter of commit {commit}",
        export_source.WITHOUT_RUN,
    ]
    assert main.main(["export", "other/none", base, "--to", "vllm"]) == 3
    assert "no such repository" in capsys.readouterr().err


def test_export_of_an_adapter_to_mlx_has_the_update_of_each_weight(
    trained: Callable[..., RunFolder],
) -> None:
    from safetensors.torch import load_file

    run = trained()
    export(run, "--to", "mlx", "--adapter")
    folder = run.path / "export-mlx-adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    held = load_file(folder / "adapters.safetensors")
    weights = load_file(run.adapter / "adapter_model.safetensors")
    assert config["fine_tune_type"] == "lora" and len(held) == len(weights)
    assert "self_attn.q_proj" in config["lora_parameters"]["keys"]
    peft = json.loads((run.adapter / "adapter_config.json").read_text())
    assert config["lora_parameters"]["scale"] == peft["lora_alpha"] / peft["r"]
    module = "model.layers.0.self_attn.q_proj"
    a, b = (weights[f"base_model.model.{module}.lora_{half}.weight"].float() for half in "AB")
    torch.testing.assert_close((held[f"{module}.lora_a"] @ held[f"{module}.lora_b"]).T, b @ a)


@pytest.mark.parametrize("options", [[], ["--quantize", "f32"], ["--adapter"]], ids=" ".join)
def test_mlx_lm_answers_as_the_fine_tuned_model(
    options: list[str], trained: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm", reason="needs mlx-lm")
    from finetune.export import mlx_export

    run = trained()
    check = export(run, "--to", "mlx", *options)["serving_check"]
    assert check["reader"].startswith("mlx-lm") and check["answers"]["agree"] and check["loss"]["agree"]
    if not options:
        assert check["token_ids"] == {"prompts": 3, "different": 0} and not check["stop_tokens"]["missing"]
    if "--adapter" in options:
        convert = mlx_export.convert

        def unscaled(*values: Any) -> Any:
            tensors, config = convert(*values)
            config["lora_parameters"]["scale"] = 1.0
            return tensors, config

        monkeypatch.setattr(mlx_export, "convert", unscaled)
        other = run.path.with_name("other")
        export(run, "--to", "mlx", *options, "--output", str(other), code=4)
        assert not other.exists()


INT8 = "compressed-tensors --quantize int8"
CLEAN = [
    (adapter, target)
    for adapter in ("lora", "dora", "rslora", "ia3", "oft", "loha", "full")
    for target in ("gguf", "ollama", "vllm", "mlx", "compressed-tensors", INT8)
]


@needs_gguf
@needs_compressed_tensors
@pytest.mark.soak
@pytest.mark.parametrize(("adapter", "target"), CLEAN)
def test_a_clean_export_raises_no_false_alarm(
    adapter: str, target: str, trained: Callable[..., RunFolder]
) -> None:
    check = export(trained(adapter), "--to", *target.split())["serving_check"]
    assert check["reader"] and check["answers"]["agree"] and check["loss"]["agree"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--to", "vllm", "--quantize", "q8_0"], "no such quantization"),
        (["--to", "ollama", "--adapter"], "exports no adapter alone"),
        (["--to", "vllm", "--output", "/nowhere/at/all"], "folder of the output"),
    ],
)
def test_export_refuses_what_a_target_does_not_have(
    options: list[str], what: str, trained: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained()
    before = {path.name for path in run.path.iterdir()}
    assert export(run, *options, code=2) == {}
    assert what in capsys.readouterr().err
    assert {path.name for path in run.path.iterdir()} == before


def test_rounding_of_a_merge_is_no_difference_of_the_server(
    trained: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model that has hardly trained, bf16 can change a single token by more than the tolerance."""
    from finetune.export import serving_check

    monkeypatch.setitem(serving_check.TOLERANCES, "bf16", 1e-4)
    monkeypatch.setattr(serving_check, "LOSS_SHARE", 1e4)
    answers = export(trained(), "--to", "vllm")["serving_check"]["answers"]
    assert answers["agree"] and answers["largest_difference"] > 10 * 1e-4


def test_export_that_answers_differently_leaves_no_files(
    trained: Callable[..., RunFolder],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from finetune.export import serving_check

    monkeypatch.setitem(serving_check.TOLERANCES, "bf16", 0.0)
    run = trained()
    before = {path.name for path in run.path.iterdir()}
    assert export(run, "--to", "vllm", code=4) == {}
    assert {path.name for path in run.path.iterdir()} == before
    assert f"({run.path / 'export-vllm-bf16'})" in capsys.readouterr().err, "the staging folder is gone"
