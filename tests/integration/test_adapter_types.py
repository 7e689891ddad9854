"""Every adapter type of the installed PEFT, through the command: trains, verifies, reopens, merges."""

import json
import subprocess
import sys

import pytest
import torch

from finetune.cli import main
from finetune.export import merging
from finetune.recipe import adapter_types
from finetune.run_folder.run_folder import RunFolder
from support.runs import run_checks
from support.soak import soak_except

TYPES = [name for name, kind in adapter_types.all_types().items() if not kind.refused and kind.peft]
RATES = {
    "ia3": 5e-2,
    "vera": 5e-2,
    "pvera": 5e-2,
    "unilora": 0.5,
    "cartridge": 3e-2,
    "prefix_tuning": 3e-2,
    "prompt_tuning": 0.3,
}
OPTIONS = {"trainable_tokens": ("adapter.token_indices=[4, 5, 6]",)}
# Types say what they can't do later, such as BEFT that can't be merged (peft 0.21.2, tuners/beft/layer.py)
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore::RuntimeWarning:peft", "ignore:Sparse invariant checks"
)
RUNS: dict[str, RunFolder] = {}
# One of each kind: low-rank, scaling, pruned, shared, rotating, of prompts, and norms
EACH_CHANGE = ["lora", "ia3", "adalora", "vera", "oft", "prompt_tuning", "ln_tuning"]
REFUSED_HERE = {"trainable_tokens"}  # the embedded model ties its head to its embeddings


def test_the_types_are_those_of_peft() -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    offered = {adapter_types.find(name).peft for name in adapter_types.all_types()}
    assert {str(name.value).lower() for name in PEFT_TYPE_TO_CONFIG_MAPPING} <= offered
    assert len(TYPES) >= 40


@pytest.fixture
def run_of(train, two_layers):
    """`run_of(type)`: a run of three steps, trained once for all tests of a type."""

    def of(kind: str) -> RunFolder:
        if kind not in RUNS:
            options = (f"adapter.type={kind}", f"train.learning_rate={RATES.get(kind, 5e-3)}")
            short = ("train.max_steps=3", "train.effective_batch_size=4", "eval.max_new_tokens=2")
            more = ("train.logging_steps=3", *OPTIONS.get(kind, ()))  # one chart for the report
            RUNS[kind] = train(*options, *more, *short, f"model.name={two_layers}", name=kind)
        return RUNS[kind]

    return of


@pytest.mark.parametrize(
    "kind", soak_except(EACH_CHANGE, [name for name in TYPES if name not in REFUSED_HERE])
)
def test_a_type_trains_verifies_reopens_and_merges(kind: str, run_of, two_layers, monkeypatch) -> None:
    monkeypatch.setattr("finetune.export.verify_merge.PROBE_ROWS", 6)  # of 32, as in test_merge.py
    run = run_of(kind)
    got = run_checks(run)
    assert all(check["passed"] for check in got.values())
    assert got["saved weights"]["actual"] == "0", "reopened from disk bit for bit"
    assert got["base weights after training"]["expected"] == got["base weights after training"]["actual"]
    assert got["adapter.type"]["actual"].split()[0] == adapter_types.find(kind).peft.upper()
    moved = [part.split() for part in got["trained weights changed"]["actual"].split(", ")]
    assert all(part[1] == part[3] for part in moved), "every trained tensor moved"
    scores = run.read("eval.json")
    if kind != "fourierft":  # begins at a random spectrum, by PEFT's default: six steps don't make it good
        assert scores["tuned"]["loss"] < scores["base"]["loss"]
    config = json.loads((run.adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(two_layers)
    if adapter_types.unmerged(kind, {}):
        assert main.main(["merge", str(run.path), "--quiet"]) == 2
    elif adapter_types.find(kind).storage == "":  # onto a 4-bit base: test_merge.py
        figures = merging.run(run.path, dtype="float32")["against_tuned"]
        assert figures["largest"] < 1e-5 * figures["scale"]


def test_trained_tokens_of_a_tied_head_are_refused_with_the_way_round(train, two_layers, capsys) -> None:
    train(
        "adapter.type=trainable_tokens",
        "adapter.token_indices=[4, 5]",
        f"model.name={two_layers}",
        code=2,
    )
    assert "trainable_token_indices" in capsys.readouterr().err


def test_trained_tokens_where_the_head_has_its_own_weights(train, untied) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(untied)("euros on")["input_ids"]
    options = ("adapter.type=trainable_tokens", f"adapter.token_indices={ids}", f"model.name={untied}")
    run = train(*options, "train.learning_rate=1e-2", "train.max_steps=5")
    assert run_checks(run)["trained weights changed"]["actual"] == "trainable_tokens_delta 1 of 1"


@pytest.mark.parametrize("kind", [n for n, k in adapter_types.all_types().items() if k.refused])
def test_what_is_not_for_fine_tuning_is_refused_with_its_reason(kind: str, capsys) -> None:
    assert main.main(["check", "recipes/quickstart.yaml", f"adapter.type={kind}"]) == 2
    assert adapter_types.find(kind).refused in capsys.readouterr().err


@pytest.mark.soak
def test_adapters_load_in_a_fresh_process_by_plain_peft(run_of, two_layers, tmp_path) -> None:
    """Cold: another process, no line of ours, the same bits."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    folders = []
    for kind in ("lora", "dora", "adalora", "ia3", "oft"):
        run = run_of(kind)
        base = AutoModelForCausalLM.from_pretrained(two_layers, dtype=torch.float32)
        with torch.no_grad():
            logits = PeftModel.from_pretrained(base, run.adapter).eval()(ids).logits
        torch.save(logits, tmp_path / f"{kind}.pt")
        folders.append((str(run.adapter), str(tmp_path / f"{kind}.pt")))
    program = f"""
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
for adapter, saved in {folders!r}:
    base = AutoModelForCausalLM.from_pretrained({str(two_layers)!r}, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, adapter).eval()(torch.tensor({ids.tolist()})).logits
    assert torch.equal(logits, torch.load(saved, weights_only=True)), adapter
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
