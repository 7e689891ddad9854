"""Merging: what transformers opens alone is what was trained, and what lost it is refused."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.autoconfig import machine_setup
from finetune.cli import main
from finetune.core.console import Console
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.evaluation import reopen
from finetune.export import merge_report, merging, staged_files, torchao_quantization
from finetune.models import loading, quantization_checks
from finetune.recipe import loader
from finetune.recipe.schema import Model
from finetune.run_folder.run_folder import RunFolder
from support import tables
from support.paths import MODEL
from support.soak import soak_except

RUNS: dict[str, Path] = {}
UNEVALUATED = "data.validation=null"  # a third of a short run is its evaluation
IDS = torch.arange(3, 3999, 37).reshape(4, 27)


@pytest.fixture
def run(train, tmp_path, monkeypatch):
    """`run(type, *overrides)`: a copy of a run of two steps that is trained once for all tests.

    It has no weights.json, as a run that a stranger sends, so that a test may change its weights.
    """

    monkeypatch.setattr(
        "finetune.export.verify_merge.PROBE_ROWS", 6
    )  # of 32: the others say the same, and cost time

    def of(kind: str, *overrides: str) -> RunFolder:
        key = " ".join((kind, *overrides))
        if key not in RUNS:
            rate = {"ia3": "5e-2", "full": "1e-3"}.get(kind, "4e-3")
            steps = "6" if kind == "adalora" else "2"
            more = [f"train.learning_rate={rate}", f"train.max_steps={steps}", "eval.max_new_tokens=2"]
            more.append(f"model.name={MODEL}")
            given = {override.partition("=")[0] for override in overrides}
            more = [override for override in more if override.partition("=")[0] not in given]
            RUNS[key] = train(f"adapter.type={kind}", *more, *overrides, name=f"trained-{len(RUNS)}").path
        copied = Path(shutil.copytree(RUNS[key], tmp_path / f"run-{len(list(tmp_path.iterdir()))}"))
        (copied / "weights.json").unlink()
        return RunFolder(copied)

    return of


def merge(folder: RunFolder, *options: str, code: int = 0) -> dict:
    assert main.main(["merge", str(folder.path), *options, "--quiet"]) == code
    return folder.read("merge.json") if (folder.path / "merge.json").exists() else {}


def plain(folder: Path | str, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(opened) -> torch.Tensor:
    with torch.no_grad():
        return opened(input_ids=IDS).logits.float()


def tuned(folder: RunFolder, base=None) -> torch.Tensor:
    """Logits of the adapter on a base in fp32, by PEFT alone."""
    from peft import PeftModel

    return logits(PeftModel.from_pretrained(base or plain(MODEL, dtype=torch.float32), folder.adapter).eval())


def away(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def left_behind(folder: RunFolder) -> list[str]:
    return [path.name for path in folder.path.iterdir() if "merge" in path.name]


def scale(folder: RunFolder, factor: float) -> None:
    """Multiply the trained update of a LoRA by a factor."""
    from safetensors.torch import load_file, save_file

    path = folder.adapter / "adapter_model.safetensors"
    tensors = {n: t * factor if "lora_B" in n else t for n, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", soak_except(["lora"], ["lora", "adalora"]))
def test_in_float32_the_merge_is_exact(kind: str, run) -> None:
    """By what others open; of every type the figures are so: test_adapter_types.py."""
    folder = run(kind, *([] if kind == "lora" else [UNEVALUATED]))
    figures = merge(folder, "--dtype", "float32")["merged"]["against_tuned"]
    merged = plain(folder.path / "merged")
    assert merged.dtype == torch.float32
    assert away(logits(merged), tuned(folder)) < 1e-5
    assert figures["relative"] < 1e-4 and figures["same_top"] == 1
    assert figures["largest"] < 1e-5 * figures["scale"] and 0 <= figures["kl"] < 1e-9


def test_in_bfloat16_it_says_how_near_it_is(run, impatient, capsys) -> None:
    from transformers import AutoTokenizer

    folder = run("lora")
    assert main.main(["merge", str(folder.path)]) == 0
    said = capsys.readouterr().out
    assert "nats per token" in said and "3 validation examples" in said and "load the model" in said
    assert re.search(r"^merge, running the fine-tuned model: \d+%, .* left$", said, re.MULTILINE)
    assert "merge, merging the adapter: " in said and "merge, verifying the merged weights: " in said
    report = folder.read("merge.json")["merged"]
    tables.assert_tables_fit(lambda: merge_report.show(Console(), report))
    assert report["dtype"] == "bfloat16" and report["merged_onto"] == "fp32" and report["scores"] == {}
    assert report["rows"]["from"] == "held-out" and report["rows"]["rows"] == 3
    assert report["tensors"]["changed"] == 42, "each linear layer but the output head"
    assert 1e-4 < report["against_tuned"]["relative"] < 0.1 and report["against_tuned"]["same_top"] > 0.95
    merged = plain(folder.path / "merged")
    assert merged.dtype == torch.bfloat16
    assert report["bytes"] == (folder.path / "merged" / "model.safetensors").stat().st_size
    names = {path.name for path in (folder.path / "merged").iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    tokenizer = AutoTokenizer.from_pretrained(folder.path / "merged")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(folder.adapter).chat_template


def test_the_merged_generation_config_is_one_that_is_saved(run, tmp_path, capsys) -> None:
    folder, base = run("lora"), tmp_path / "sampling"
    shutil.copytree(MODEL, base)
    (base / "generation_config.json").write_text('{"temperature": 0.9, "eos_token_id": 1}')
    assert main.main(["merge", str(folder.path), f"model.name={base}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "do_sample: true, which temperature 0.9 of the base needs" in said
    assert "eos_token_id [1, 3] in generation_config.json, in place of 1" in said
    saved = json.loads((folder.path / "merged" / "generation_config.json").read_text())
    assert saved["do_sample"] and saved["temperature"] == 0.9 and saved["eos_token_id"] == [1, 3]


def test_the_figures_are_those_of_a_plain_computation() -> None:
    from finetune.export.verify_merge import agreement

    torch.manual_seed(0)
    wanted, base, got = ([torch.randn(n, 50) for n in (3, 7)] for _ in range(3))
    figures = agreement(wanted, base, got)
    w, b, g = map(torch.cat, (wanted, base, got))
    kl = (
        torch.nn.functional.kl_div(g.log_softmax(-1), w.log_softmax(-1), log_target=True, reduction="sum")
        / 10
    )
    assert figures["kl"] == pytest.approx(kl.item(), rel=1e-5)
    assert figures["relative"] == pytest.approx(((g - w).norm() / (w - b).norm()).item(), rel=1e-5)
    untrained, exact = agreement(wanted, base, base), agreement(wanted, base, wanted)
    assert untrained["relative"] == 1 and untrained["kl"] == untrained["kl_base"] == figures["kl_base"]
    assert exact["relative"] == exact["kl"] == exact["largest"] == 0 and exact["same_top"] == 1


@pytest.mark.parametrize("precision", soak_except(["no"], ["no", "bf16"]))
def test_a_4_bit_run_is_merged_onto_what_training_saw(precision: str, run, monkeypatch) -> None:
    from finetune.export.verify_merge import logits as in_fp32

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    folder = run("qlora", UNEVALUATED, f"train.seed={len(precision)}", "train.effective_batch_size=1")
    report = merge(folder, "--dtype", "float32")["merged"]
    assert report["merged_onto"] == "nf4"
    merged = torch.stack(in_fp32(plain(folder.path / "merged"), IDS.tolist()))
    live = torch.stack(in_fp32(reopen.reopen(folder, loader.load(folder.recipe)), IDS.tolist()))
    assert away(merged, live) < 1e-4
    assert away(merged, tuned(folder)) > 1e-2, "the base as it was before it was quantized is another model"


def test_an_update_that_rounding_erased_is_refused(run, capsys) -> None:
    folder = run("lora", "train.learning_rate=1e-7", "train.max_steps=1", UNEVALUATED)
    merge(folder, code=4)
    said = capsys.readouterr().err
    assert "a merge in bfloat16 loses the training update" in said and "--dtype float32" in said
    assert left_behind(folder) == []
    assert merge(folder, "--dtype", "float32")["merged"]["against_tuned"]["relative"] < 0.1


def test_an_adapter_that_changes_nothing_is_refused(run, capsys) -> None:
    folder = run("lora")
    scale(folder, 0)
    merge(folder, "--dtype", "float32", code=4)
    assert (
        "the fine-tuned model equals the base model" in capsys.readouterr().err and left_behind(folder) == []
    )


def test_weights_that_are_not_finite_are_refused(run, capsys) -> None:
    folder = run("lora")
    scale(folder, float("inf"))
    merge(folder, code=4)
    assert "have NaN or Inf" in capsys.readouterr().err and left_behind(folder) == []


def test_a_tied_head_stays_tied(run) -> None:
    folder = run("lora")
    merge(folder)
    assert "lm_head.weight" not in tensors(folder.path / "merged")
    merged = plain(folder.path / "merged")
    assert merged.config.tie_word_embeddings and merged.lm_head.weight is merged.model.embed_tokens.weight


# PEFT says that the tie will be lost, which is what is looked at (peft 0.21.2, tuners/tuners_utils.py)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_head_that_was_trained_apart_is_saved_apart(run) -> None:
    """The base ties its head to the embeddings; training the head alone must not change both."""
    folder = run("lora", "adapter.modules_to_save=[lm_head]", UNEVALUATED)
    merge(folder, "--dtype", "float32")
    merged = plain(folder.path / "merged")
    assert not merged.config.tie_word_embeddings
    assert torch.equal(merged.model.embed_tokens.weight, plain(MODEL, dtype=torch.float32).lm_head.weight)
    assert away(logits(merged), tuned(folder)) < 1e-5


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "error"), soak_except(["int4"], [("int8", 0.1), ("int4", 0.7), ("fp8", 0.2)])
)
def test_quantized_weights_are_measured_before_and_after(kind: str, error: float, run, capsys) -> None:
    folder = run("lora")
    assert main.main(["merge", str(folder.path), "--quantize", kind]) == 0
    assert "42 linear layers; not quantized: output head" in capsys.readouterr().out
    report = folder.read("merge.json")[f"merged-{kind}"]
    opened = plain(folder.path / f"merged-{kind}")
    assert type(opened.model.layers[0].mlp.up_proj.weight).__module__.startswith("torchao.")
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    assert opened.lm_head.weight.dtype == torch.bfloat16
    assert away(logits(opened), tuned(folder)) < error
    assert 0 < report["against_merged"]["relative"] < error
    assert report["against_tuned"]["kl"] < 0.2 * report["against_tuned"]["kl_base"]
    assert report["bytes"] < 0.7 * report["bytes_before"]
    scores = report["scores"]
    assert set(scores) == {"tuned", "merged", "quantized"}
    assert scores["tuned"] == folder.read("eval.json")["tuned"]
    assert scores["quantized"]["loss"] == pytest.approx(scores["merged"]["loss"], rel=0.05)
    assert set(left_behind(folder)) == {f"merged-{kind}", "merge.json"}


def test_experts_that_stay_as_they_are_are_named(tmp_path) -> None:
    """Their weights stand in one parameter for all of a layer: neither torchao nor bitsandbytes takes it."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "vocab_size": 64, "num_local_experts": 4}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes, **more))
    made.to(torch.bfloat16).save_pretrained(tmp_path)
    setup = machine_setup.choose(attention="sdpa", base="auto", adapter_type="qlora")
    small = torchao_quantization.load(tmp_path, "int8", torch.bfloat16, setup.hardware)
    stacked = 4 * 3 * 64 * 64 * 2
    said = torchao_quantization.kept(small, 2 * stacked)
    assert (
        said == f"{torchao_quantization.KEPT}, experts (0.1 MB, 50% of the stored weights; "
        "they are not linear layers)"
    )
    assert torchao_quantization.kept(torch.nn.Linear(2, 2), 1) == torchao_quantization.KEPT
    loading.load(Model(name=str(tmp_path)), setup, "cpu", checks := RunChecks())
    (found,) = checks.as_json()
    assert (
        found["option"] == "model.quantization" and found["passed"] and found["actual"].startswith("4 of 4 ")
    )
    assert found["actual"].endswith("; experts: 0.09 MiB (in bf16) in 0.03 MiB")


def test_a_base_that_is_none_of_codes_is_no_quantized_one(two_layers) -> None:
    plain = AutoModelForCausalLM.from_pretrained(two_layers)
    quantization_checks.add_quantized_weights_check(plain, "nf4", checks := RunChecks())
    with pytest.raises(UserError, match="run check failed") as raised:
        checks.check()
    assert raised.value.code == 3 and "0 of 14 linear layers" in str(raised.value)


def test_quantizing_that_drowns_the_update_is_refused(run, capsys) -> None:
    folder = run("lora")
    scale(folder, 0.002)
    merge(folder, "--quantize", "int4", "--dtype", "float32", code=4)
    said = capsys.readouterr().err
    assert (
        "quantization to int4 changes the model more than training did" in said
        and "--quantize int8" in said
        and left_behind(folder) == []
    )


def test_without_torchao_the_pip_line(run, monkeypatch, capsys) -> None:
    folder = run("lora")
    monkeypatch.setitem(sys.modules, "torchao", None)
    merge(folder, "--quantize", "int8", code=3)
    assert "pip install -e '.[quantize]'" in capsys.readouterr().err


def test_what_torchao_can_t_store_is_said(run, monkeypatch, capsys) -> None:
    """As on a GPU: packed int4, which this machine has no kernel for."""
    from torchao.quantization import Int4WeightOnlyConfig

    from finetune.export import torchao_quantization

    monkeypatch.setattr(
        torchao_quantization, "choose", lambda *_: (Int4WeightOnlyConfig(group_size=32), "int4")
    )
    folder = run("lora")
    merge(folder, "--quantize", "int4", code=3)
    said = capsys.readouterr().err
    assert "torchao can't quantize to int4 on CPU" in said and "mslk" in said and left_behind(folder) == []


def test_full_fine_tuning_has_nothing_to_merge_but_can_be_quantized(run, capsys) -> None:
    folder = run("full")
    merge(folder, code=2)
    assert "the run has no adapter to merge" in capsys.readouterr().err
    report = merge(folder, "--quantize", "int8")["merged-int8"]
    assert set(report["scores"]) == {"tuned", "quantized"}
    assert report["bytes_before"] == (folder.model / "model.safetensors").stat().st_size


def test_nothing_is_overwritten(run, tmp_path, capsys) -> None:
    folder = run("lora")
    merge(folder)
    before = (folder.path / "merged" / "model.safetensors").stat()
    merge(folder, "--dtype", "float32", code=2)
    assert "the output folder is not empty" in capsys.readouterr().err
    assert (folder.path / "merged" / "model.safetensors").stat() == before
    merge(folder, "--output", str(tmp_path / "no" / "where"), code=2)
    assert "mkdir -p" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert set(merge(folder, "--output", str(tmp_path / "empty"))) == {"merged", str(tmp_path / "empty")}
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_what_is_merged_elsewhere_is_not_what_the_run_folder_holds(tmp_path, monkeypatch) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.path / "merged").mkdir(parents=True)
    (tmp_path / "staged").mkdir()
    folder.write("merge.json", {"merged": {"dtype": "bfloat16"}})
    monkeypatch.chdir(tmp_path)
    merging.publish(tmp_path / "staged", Path("merged"), folder, {"dtype": "float32"})
    _, weights = staged_files.find_weights(folder, merged=True)
    assert weights == folder.path / "merged"
    assert staged_files.merge_report(folder, weights) == {"dtype": "bfloat16"}
    folder.write("merge.json", {str(tmp_path / "merged"): {"dtype": "float32"}})
    with pytest.raises(UserError, match="outside the run folder"):
        staged_files.find_weights(folder, merged=True)


def test_a_type_that_peft_can_t_merge(run, capsys) -> None:
    from peft import PromptTuningConfig, TaskType, get_peft_model

    folder = run("lora")
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    (folder.adapter / "adapter_model.safetensors").unlink()
    get_peft_model(plain(MODEL, dtype=torch.float32), config).save_pretrained(folder.adapter)
    merge(folder, code=2)
    said = capsys.readouterr().err
    assert (
        "PEFT can't merge a PROMPT_TUNING adapter" in said and "merge_and_unload" in said and "help:" in said
    )
    assert left_behind(folder) == []


def test_without_held_out_rows_training_rows_prove_it(run, capsys) -> None:
    folder = run("ia3", UNEVALUATED)
    assert main.main(["merge", str(folder.path), "--quantize", "int8"]) == 0
    said = capsys.readouterr().out
    assert "6 training examples" in said and "exact match" not in said
    report = folder.read("merge.json")["merged-int8"]
    assert report["rows"]["from"] == "training" and report["scores"] == {}


def test_a_saved_folder_that_lacks_weights_is_refused(run, monkeypatch, capsys) -> None:
    from transformers import LlamaForCausalLM

    original = LlamaForCausalLM.save_pretrained

    def broken(self, folder, **options):
        from safetensors.torch import save_file

        original(self, folder, **options)
        kept = {name: t for name, t in tensors(Path(folder)).items() if "layers.3.mlp.up" not in name}
        save_file(kept, Path(folder) / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", broken)
    folder = run("lora")
    merge(folder, code=4)
    said = capsys.readouterr().err
    assert "layers.3.mlp.up_proj.weight" in said and str(folder.path) in said and left_behind(folder) == []


def test_merge_wants_a_run(tmp_path, capsys) -> None:
    assert main.main(["merge", str(tmp_path)]) == 2
    assert json.dumps(str(tmp_path))[1:-1] in capsys.readouterr().err
