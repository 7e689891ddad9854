"""An ablation as data: what is wrong with one, said before it runs; the shipped one, its page, baselines."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.autoconfig.batch_size import split_batch
from finetune.cli import main
from finetune.core.errors import UserError
from finetune.experiments.ablation import ablation_report, optimizations
from finetune.experiments.runner import measured_run, varied_keys
from finetune.experiments.sweep import search_space
from finetune.hardware import detection
from finetune.preflight import choice_checks
from finetune.recipe import loader
from finetune.speed import live_model_spec
from finetune.training import load_data, model_setup, speed_setup, step_work, training_arguments
from finetune.training.run_context import RunData
from support.paths import QUICKSTART, ROOT
from support.scripts import module_of
from support.trainers import run_context

SHIPPED = optimizations.read(ROOT / "recipes" / "ablation.yaml")


def test_an_ablation_is_copied_with_its_keys(tmp_path: Path, monkeypatch) -> None:
    """`on` and `off`, which YAML 1.1 takes for truths."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ablation as benchmark

    copy = benchmark.changed(ROOT / "recipes" / "ablation.yaml", tmp_path, ["packing"], {"repeats": 1})
    made = optimizations.read(copy)
    assert (
        made.measure.repeats == 1
        and made.optimization("packing").elsewhere
        and not made.optimization("bf16").elsewhere
    )
    assert [optimization.on for optimization in made.optimizations] == [
        optimization.on for optimization in SHIPPED.optimizations
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "baseline: {}\noptimizations: [{name: a, kind: b, what: c, on: [d]}]",
            [":2:50", "names no earlier optimization"],
        ),
        (
            "baseline: {}\noptimizations: [{name: a, kind: b, what: c}, {name: a, kind: b, what: c}]",
            ["have the same name"],
        ),
        (
            "baseline: {}\noptimizations: [{name: a, kind: b, what: c, sets: {}}]",
            [":2:45", "unknown key", "rename it to `set`\n"],
        ),
        (
            "baseline: {}\noptimizations: []\nmeasure: {repeat: 2}",
            [":3:11", "unknown key", "rename it to `repeats`\n"],
        ),
        ("baselin: {}\noptimizations: []", ["unknown section", "rename it to `baseline`\n"]),
        ("baseline: {}\noptimizations: [{name: ../../evil, kind: b, what: c}]", [":2:18", "[a-z0-9_]+"]),
        ("baseline: {}\noptimizations: [{name: a, kind: a/b, what: c}]", [":2:27", "[a-z]+"]),
        ("baseline: {}\noptimizations: [{name: a, kind: baseline, what: c}]", [":2:27", "other results"]),
        ("baseline: {}\noptimizations: [{name: a, kind: recipe, what: c}]", [":2:27", "other results"]),
        (
            "baseline: {set: {train.optmi: x}}\noptimizations: []",
            [":1:18", "train.optmi", "rename it to `optim`\n"],
        ),
        (
            "baseline: {}\noptimizations: [{name: a, kind: b, what: c, set: {optim: adamw_torch}}]",
            [":2:51", "train.optim\n"],
        ),
        ("baseline: {set: {train.optim: nonsense}}\noptimizations: []", [":1:18", "train.optim"]),
        (
            "baseline: {}\noptimizations:\n"
            "- {name: a, kind: b, what: c, set: {train.save_steps: abc, adapter.r: 0}}\n"
            "- {name: d, kind: b, what: c, full: {set: {data.packing: 4}}, set: {train.tf32: default}}",
            [":3:37)", ":3:60)", ":4:44)"],
        ),
        (
            "baseline: {set: {train.output_dir: here, eval.eval_steps: 2}}\noptimizations:\n"
            "- {name: a, kind: b, what: c,"
            " set: {train.max_steps: 9, data.name: other.jsonl}, full: {set: {data.max_length: 8}}}",
            [":1:18)", "folder of its own", ":1:42)", ":3:37)", "measure.steps", ":3:57)", ":3:95)"],
        ),
        ("baseline: {}\noptimizations: []\nmeasure: {steps: 3, warm_up: 3}", [":3:21", "warm_up below 3"]),
        ("- 1", ["the ablation file has no list of optimizations"]),
        (b"baseline: {}\n# caf\xe9", ["byte 18", "not UTF-8"]),
    ],
)
def test_a_wrong_ablation_file_is_exit_2(
    text: str | bytes, said: list[str], tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(measured_run, "make", lambda *_, **__: pytest.fail("a run began"))
    (tmp_path / "ablation.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    words = ["ablate", str(QUICKSTART), "--optimizations", str(tmp_path / "ablation.yaml")]
    assert main.main([*words, "--output", str(tmp_path / "results")]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in said), error


def test_a_baseline_that_this_machine_can_not_run_is_exit_3_before_a_run(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(measured_run, "make", lambda *_, **__: pytest.fail("a run began"))
    (tmp_path / "ablation.yaml").write_text(
        "baseline: {set: {model.attention: flash_attention_2}}\noptimizations: [{name: a, kind: b, what: c}]"
    )
    words = ["ablate", str(QUICKSTART), "--optimizations", str(tmp_path / "ablation.yaml")]
    assert main.main([*words, "--output", str(tmp_path / "results")]) == 3
    error = capsys.readouterr().err
    assert "ablation.yaml:1:18" in error and "flash_attention_2" in error


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("num_machines: 2", "this launch must use only this machine"),
        ("main_process_ip: 192.0.2.1", "this launch must use only this machine"),
        ("num_processes: 10000", "this machine has cores for"),
        ("mpirun_config: {mpirun_hostfile: hosts}", "this launch must use only this machine"),
        ("deepspeed_config: {offload_param_nvme_path: /home}", "must not name a folder to write into"),
        ("deepspeed_config: {offload_optimizer_nvme_path: /home}", "must not name a folder to write into"),
    ],
)
def test_an_accelerate_config_of_an_ablation_that_leads_out_of_this_machine_or_folder_is_refused(
    line: str, said: str, tmp_path, monkeypatch, capsys
) -> None:
    """A stranger's file of optimizations can name a config of the stranger."""
    monkeypatch.setattr("finetune.launch.accelerate_config._missing_package", lambda *_: None)
    config, file = tmp_path / "launch.yaml", tmp_path / "ablation.yaml"
    alone = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\n"
    kind = "DEEPSPEED" if "deepspeed" in line else "MULTI_GPU" if "num_processes" in line else "MULTI_CPU"
    kind = alone.replace("MULTI_CPU", kind)
    config.write_text(kind + line)
    file.write_text(f"measure: {{accelerate: {config}}}\nbaseline: {{}}\noptimizations: []\n")
    monkeypatch.setattr("finetune.experiments.runner.measured_run.make", lambda *_, **__: pytest.fail("ran"))
    words = ["ablate", str(QUICKSTART), "--optimizations", str(file), "--output", str(tmp_path / "out")]
    assert main.main(words) == 2
    assert said in capsys.readouterr().err
    config.write_text(f"{alone}num_machines: 1\nmain_process_ip: localhost\n")
    optimizations.check_configs(optimizations.read(file))


def test_keys_of_an_ablation_may_be_any_of_a_recipe() -> None:
    for key in ("adapter.r", "adapter.rank_pattern.q_proj", "speed.qat.group_size", "train.optim"):
        assert varied_keys.key_problem(key, 1, "") is None
    for key in ("adapter.rr", "speed.qat.group", "train", "train.", "nothing.at"):
        assert varied_keys.key_problem(key, 1, "") is not None


def test_full_fine_tuning_has_an_ablation_of_its_own() -> None:
    """Nothing that asks for a frozen base or an adapter, and nothing said of one."""
    made, kept = optimizations.of_type(SHIPPED, "full"), optimizations.of_type(SHIPPED, "lora")
    assert (
        kept.optimization("bf16").set == {"model.quantization": "none"}
        and made.optimization("bf16").set == {}
    )
    assert made.optimization("bf16").mixed_precision == "bf16"
    for optimization in made.optimizations:
        if optimization.unmeasured[0]:
            continue
        stack = optimizations.add(optimizations.below(made, optimization), optimization, rows=4)
        loader.load(QUICKSTART, ["adapter.type=full", *stack.overrides])
    for name in ("fp8_base", "nf4_base", "fast_adapter", "recompute_mlp", "fused_qkv"):
        assert made.optimization(name).unmeasured[0] == "no-op"
    assert kept.optimization("offload_optimizer").unmeasured[0] == "elsewhere"
    assert made.optimization("offload_optimizer").set == {"speed.offload": "optimizer"}
    assert not [
        optimization
        for optimization in made.optimizations
        if "an adapter's state" in "".join(optimization.unmeasured)
    ]


def test_what_a_cpu_has_no_instructions_for_is_skipped() -> None:
    cpu = detection.Hardware("cpu", "CPU", 1, (0, 0), 16.0, 2)
    lacks = optimizations.Needs(capability=8.0, instructions=["avx513_bf17", "amx_none"])
    assert optimizations.missing(lacks, cpu) == "this CPU has none of avx513_bf17, amx_none"
    assert not optimizations.missing(optimizations.Needs(instructions=["avx513_bf17", "avx2", "neon"]), cpu)
    assert not optimizations.missing(lacks, detection.Hardware("cuda", "NVIDIA H200", 1, (9, 0), 139.8, 16))


def test_a_no_op_has_no_switch() -> None:
    found = {
        optimization.name: optimization.unmeasured[0]
        for optimization in SHIPPED.optimizations
        if optimization.unmeasured[0]
    }
    elsewhere = {name for name, status in found.items() if status == "elsewhere"}
    assert elsewhere == {
        *("offload_optimizer", "fused_qkv", "transformer_engine", "sharding", "batch_search", "streaming")
    }


# The shipped ablation file, its docs, and the baselines


def off(optimization: optimizations.Optimization) -> dict[str, str]:
    """What switches a optimization off, by key."""
    return dict(re.findall(r"((?:train|speed|data|model)\.\w+|mixed_precision): ([^ )]+)", optimization.off))


def test_every_optimization_loads_and_can_be_switched_off_alone() -> None:
    everything = optimizations.baseline(SHIPPED)
    for optimization in SHIPPED.optimizations:
        if optimization.unmeasured[0]:
            continue
        assert optimization.off and optimization.source
        on = optimizations.add(optimizations.below(SHIPPED, optimization), optimization, rows=4)
        loader.load(QUICKSTART, on.overrides)
        everything = optimizations.add(everything, optimization, rows=4)
        values = off(optimization)
        assert values, optimization.off
        values.pop("mixed_precision", None)
        switched = loader.load(QUICKSTART, [*on.overrides, *[f"{k}={v}" for k, v in values.items()]])
        for key in values:
            assert search_space.own_value(switched, key) != on.values.get(key, "what the recipe says")
    loader.load(QUICKSTART, everything.overrides)


def made(overrides: list[str], precision: str | None, monkeypatch) -> dict[str, Any]:
    """What a run is made of before its first step: read from the model, its arguments and its rows."""
    if precision:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    one = loader.load(QUICKSTART, overrides)
    setup = choice_checks.setup_of(one)
    run = run_context(one, setup)
    arguments = training_arguments.training_arguments(one.train, one.data, setup, split_batch(one.train, 1))
    tokenizer, prepared = load_data.prepare_data(one)
    model = model_setup.adapted_model(run, RunData(tokenizer, prepared, arguments), 2)
    work = step_work.work_of(model, one, setup, 64, 1.0)
    fast = speed_setup.make_fast(run, model, arguments, work)
    return {
        "attention": model.config._attn_implementation,
        "dtype": next(p.dtype for p in model.parameters() if not p.requires_grad),
        "bf16": arguments.bf16,
        "recomputed": sum(layer.gradient_checkpointing for layer in live_model_spec.decoder_layers(model)),
        "loss": fast["speed.loss"].value,
        "optim": str(arguments.optim),
        "flat": arguments.padding_free,
        "rows": len(prepared.train),
        "sampling": arguments.train_sampling_strategy,
        "workers": arguments.dataloader_num_workers,
        "at once": arguments.per_device_train_batch_size,
    }


HERE = [
    optimization.name
    for optimization in SHIPPED.optimizations
    if not optimization.unmeasured[0] and optimization.needs.device != "cuda"
]


@pytest.mark.parametrize("name", HERE)
def test_switched_off_alone_an_optimization_does_nothing(name: str, small, two_layers, monkeypatch) -> None:
    """What it changed in the run is changed back by what its `off` says, with all else as it was."""
    optimization = SHIPPED.optimization(name)
    given = [*small, f"model.name={two_layers}", "train.effective_batch_size=8"]
    under, values = optimizations.below(SHIPPED, optimization), off(optimization)
    on = optimizations.add(under, optimization)
    precision = values.pop("mixed_precision", on.mixed_precision or "").strip('"')
    before = made([*given, *under.overrides], under.mixed_precision, monkeypatch)
    found = made([*given, *on.overrides], on.mixed_precision, monkeypatch)
    switched = [f"{key}={value}" for key, value in values.items()]
    without = made([*given, *on.overrides, *switched], precision, monkeypatch)
    changed = [fact for fact in found if found[fact] != before[fact]]
    assert changed, f"{name} changes nothing that is looked at"
    assert not [fact for fact in changed if without[fact] == found[fact]]


def test_the_page_of_optimizations_is_current() -> None:
    script = module_of("scripts", "make_optimizations")
    assert script.PAGE.read_text() == script.page(), "scripts/make_optimizations.py"


def test_the_benchmark_s_pages_name_its_command(tmp_path, monkeypatch) -> None:
    script, place = module_of("benchmarks", "ablation"), tmp_path / "8b"
    place.mkdir()
    measured_there = json.loads((ROOT / "benchmarks" / "ablation_gpu.json").read_text())
    made = {**measured_there, "command": f"finetune ablate {tmp_path}/8b.yaml"}
    (place / "ablation.json").write_text(json.dumps(made))
    ablation_report.write(place, made, detection.detect())
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(script, "HERE", tmp_path / "benchmarks")
    script.publish(made, place, f"python benchmarks/ablation.py --work {tmp_path}/work")
    written = {path.suffix: path.read_text() for path in (tmp_path / "benchmarks").iterdir()}
    assert json.loads(written[".json"])["command"] == "python benchmarks/ablation.py --work work"
    assert "`python benchmarks/ablation.py --work work`" in written[".md"] and "<svg" in written[".svg"]


FROZEN = {
    "llama3_8b": "410a9829aecb5146",
    "quickstart": "0a8e1f6d3affa9fe",
}


@pytest.mark.parametrize("name", FROZEN)
def test_baselines_are_frozen(name: str) -> None:
    values = yaml.safe_load((ROOT / "recipes" / "baselines" / f"{name}.yaml").read_text())
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == FROZEN[name], "speed-ups are quoted over it: make another file"


def test_an_ablation_is_no_recipe(capsys) -> None:
    with pytest.raises(UserError, match="no shipped recipe"):
        from finetune.core import shipped_files

        shipped_files.copy("ablation", Path("nowhere"))
