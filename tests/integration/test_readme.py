"""The README's commands are run, its example recipe loads, and its numbers are those that were measured."""

import json
import re
import shlex

import pytest

from finetune.cli import main
from finetune.recipe import loader
from support.paths import ROOT
from support.scripts import module_of

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^    ((?:finetune|accelerate|make) [^#\n]*)", README, re.MULTILINE)
SHORT = ["train.max_steps=1", "train.warmup_steps=0", "train.effective_batch_size=2", "eval.max_new_tokens=4"]


def test_the_commands_are_there() -> None:
    assert sum(command.startswith("make ") for command in COMMANDS) == 2
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", [c.strip() for c in COMMANDS if c.startswith("finetune")])
def test_a_finetune_command_runs(command: str, trained, small, two_layers, tmp_path, capsys) -> None:
    """Launched in two processes: test_train.py trains by that command, so that here its recipe is checked."""
    words = shlex.split(command)[1:]
    if words[0] in ("evaluate", "merge", "report", "chat", "publish"):
        words[1] = str(trained().path)
        words += ["eval.limit=4"] if words[0] == "evaluate" else []
    elif words[0] == "compare":
        words += [
            *SHORT,
            *small,
            "eval.forgetting=false",
            f"model.name={two_layers}",
            "--output",
            str(tmp_path / "compare"),
        ]
    elif words[0] == "sweep":  # test_sweep.py has a study
        words += ["--export-wandb", str(tmp_path / "sweep.yaml")]
    elif words[0] == "profile":
        words += [
            *small,
            "eval.forgetting=false",
            f"model.name={two_layers}",
            "--output",
            str(tmp_path / "out"),
        ]
    elif words[0] == "ablate":  # test_ablate.py climbs a ladder; this one has too many runs for a test
        words = ["check", words[1]]
    elif words[0] == "recipes" and "--copy" in words:
        words[-1] = str(tmp_path / words[-1])
    elif words[0] == "train":
        words += [*SHORT, *small, "eval.forgetting=false", f"model.name={two_layers}"]
        words.append(f"train.output_dir={tmp_path}/run")
        if "--accelerate" in words:
            assert words[2:4] == ["--accelerate", "cpu_2"]
            words = ["check", words[1]]
    assert main.main(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", [c.strip() for c in COMMANDS if c.startswith("accelerate")])
def test_an_accelerate_line_names_what_exists(command: str) -> None:
    """That such lines train is shown in test_train.py; here: they are spelt as Accelerate reads them."""
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(shlex.split(command)[2:])
    assert (ROOT / options.config_file).exists()
    assert options.training_script == "finetune" or (ROOT / options.training_script).exists()
    words = options.training_script_args
    # FlashAttention 3 is for the GPUs of that recipe
    assert main.main(["check", words[-1], "model.attention=auto"]) == 0


def test_make_has_the_targets() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.split()[1] for command in COMMANDS if command.startswith("make")} <= set(targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_example_recipe_is_valid(tmp_path) -> None:
    lines = re.findall(r"^    ((?:model|data|adapter|speed|train|eval|publish): .*)", README, re.MULTILINE)
    assert len(lines) == 7
    (tmp_path / "recipe.yaml").write_text("\n".join(lines))
    loaded = loader.load(tmp_path / "recipe.yaml")
    assert loaded.adapter.type == "dora" and loaded.origin.notices == []


def test_every_table_is_made_from_what_was_measured() -> None:
    make_tables = module_of("scripts", "make_tables")
    made = make_tables.pages()
    for page, text in made.items():
        assert (ROOT / page).read_text() == text, f"scripts/make_tables.py: {page}"
    shown = {name for text in made.values() for name in make_tables.BLOCK.findall(text)}
    files = {name: ROOT / "benchmarks" / f"{of}.json" for name, (_, of) in make_tables.TABLES.items()}
    unmeasured = {name for name, file in files.items() if not file.exists()}
    assert make_tables.TABLES.keys() - shown == {"reliability", *unmeasured}
    assert "\n|" not in make_tables.BLOCK.sub("", made["benchmarks/README.md"]), "a table made by hand"


def test_the_speed_of_evaluation_is_what_was_measured() -> None:
    evaluation = module_of("benchmarks", "evaluation")
    results = json.loads(evaluation.RESULTS.read_text())
    found = [part for name, part in results.items() if name.startswith("speed")]
    assert found
    for part in found:
        rates = part["samples_per_second"]
        assert rates["finetune"] >= rates["lm_eval"]
        assert part["accuracy"]["finetune"] == part["accuracy"]["lm_eval"]


def test_what_is_said_of_verdicts_is_what_was_simulated() -> None:
    simulated = json.loads((ROOT / "benchmarks" / "verdicts.json").read_text())
    false = [rate for sizes in simulated["false"].values() for rates in sizes.values() for rate in rates]
    assert f"at most {max(false):.1%} of {simulated['runs']:,} simulated evaluations" in README
    found = list(simulated["found"].values())
    assert f"in {min(found[:3]):.0%} to {max(found[:3]):.0%} of evaluations" in README
    assert f"in {min(found[3:]):.0%} to {max(found[3:]):.0%}" in README


def test_what_is_said_of_several_gpus_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "multi_gpu.json").read_text())
    rates = {name: row["tokens_per_second"] for name, row in measured.items()}
    bf16, fp8 = (rates[f"lora-{base} x4"] / rates[f"lora-{base} x1"] for base in ("bf16", "fp8"))
    assert f"{bf16:.2f} (bf16) and {fp8:.2f} (fp8 base) times" in README
    assert f"[{rates['lora-fp8 x4']:,.0f} tokens/s]" in README
    assert f"as MLPerf has them, {rates['70b-fp8 x4'] / 4:,.0f} on each" in README
    assert f"({rates['128k-cp x4']:,.0f} tokens/s" in README


def test_the_fp8_base_s_loss_is_near_enough_to_bf16_s() -> None:
    parity = module_of("benchmarks", "loss_parity")
    measured = json.loads(parity.RESULTS.read_text())
    assert all(one["within"] for one in measured.values())
    assert all((parity.RESULTS.parent / f"loss_parity-{data}.svg").exists() for data in measured)


def test_what_is_said_of_a_gpu_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "gpu.json").read_text())
    readme = " ".join((ROOT / "README.md").read_text().split())
    slower = sorted(
        measured[f"dora-{base}"]["step_seconds"] / measured[f"lora-{base}"]["step_seconds"]
        for base in ("bf16", "fp8")
    )
    assert "DoRA takes {:.2f} to {:.2f} times as long".format(*slower) in readme
    several = json.loads((ROOT / "benchmarks" / "multi_gpu.json").read_text())
    for row in (measured["70b-fp8-auto"], several["32k x1"]):
        assert f"({row['tokens_per_second']:,.0f} tokens/s" in readme
    assert measured["cap-48"]["peak_gib"] < 48
