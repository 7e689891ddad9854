"""finetune profile: three planted bottlenecks are named right, and a trace is left that opens."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from typing import Any

import pytest

from finetune.autoconfig.batch_size import split_batch
from finetune.checkpointing import training_state
from finetune.cli import main
from finetune.core.errors import Problem, UserError
from finetune.experiments.runner import measured_run, verify_resume
from finetune.experiments.runner.measured_run import saves
from finetune.hardware import detection
from finetune.planning import planner
from finetune.preflight import checker
from finetune.profiling import profiler, recommendations, trace_analysis
from finetune.recipe import loader, schema
from finetune.training import pipeline, step_metrics
from support import tables
from support.json_fields import documented_fields
from support.paths import QUICKSTART
from support.profiles import GPU, SlowLoader
from support.soak import soak_except

CPU = detection.Hardware("cpu", "CPU", 1, (0, 0), 16.0, 2)


PLANTED = {
    "data": (["train.effective_batch_size=4"], [SlowLoader()], "waits for data"),
    "batch": (["train.effective_batch_size=1"], [], "because the batch is small"),
    "attention": (
        ["train.effective_batch_size=2", "data.packing=true", "data.max_length=384", "model.attention=eager"],
        [],
        "eager attention takes",
    ),
}


@pytest.mark.alone
@pytest.mark.parametrize("planted", soak_except(["data"], PLANTED))
def test_a_planted_bottleneck_is_named(planted: str, small, two_layers, tmp_path) -> None:
    overrides, callbacks, said = PLANTED[planted]
    given = [*small, f"model.name={two_layers}", "eval.forgetting=false", *overrides]
    for attempt in range(3):  # it measures time: what else a machine does may look like a wait
        found = profiler.run(str(QUICKSTART), given, str(tmp_path / str(attempt)), callbacks)
        if said in found.verdict:
            break
    assert said in found.verdict, found
    assert sum(found.shares.values()) == pytest.approx(1, abs=0.01) and min(found.shares.values()) >= 0
    assert found.shares["products"] > 0.02 and found.attention == (
        "eager" if planted == "attention" else "sdpa"
    )
    traced = json.loads(found.trace.read_text())["traceEvents"]
    assert {"forward", "backward", "optimizer"} <= {event.get("name") for event in traced}
    assert found.roofline and 0.01 < found.roofline[0] < 1.5 and "measured now" in found.roofline[1]
    assert [path.name for path in found.trace.parent.iterdir()] == ["trace.json"]


def test_what_goes_by_a_whole_run_is_cut_too(small, two_layers, tmp_path, monkeypatch) -> None:
    """Evaluations that a run ends by, AdaLoRA's schedule; and nothing is left of a run that fails."""
    given = [
        *small,
        f"model.name={two_layers}",
        "eval.eval_steps=50",
        "eval.early_stopping_patience=2",
        "eval.metric_for_best_model=exact_match",
    ]
    whole = [*given, "adapter.type=adalora", "adapter.tinit=50", "adapter.tfinal=40"]
    whole += ["adapter.orth_reg_every=20", "train.max_steps=100", "train.save_steps=2"]
    runs = []

    def fail(short: schema.Recipe, **_: Any) -> None:
        checker.check_without_examples(short)
        runs.append(short)
        raise MemoryError

    monkeypatch.setattr(pipeline, "run", fail)
    with pytest.raises(MemoryError):
        profiler.run(str(QUICKSTART), whole, str(tmp_path))
    (short,) = runs
    assert short.adapter.ours("orth_reg_every") == short.train.max_steps == 9 and saves(short.train) == "no"
    assert short.adapter.options()["tinit"] + short.adapter.options()["tfinal"] < 8
    assert list(tmp_path.iterdir()) == []
    adapter = loader.load(QUICKSTART, whole).adapter
    short_ones = measured_run.length(3, 1, adapter)
    loader.load(QUICKSTART, [*whole, *short_ones])
    quantized = loader.load(QUICKSTART, [*whole, "adapter.type=qadalora"])
    assert measured_run.length(3, 1, quantized.adapter) == short_ones and "adapter.tinit=0" in short_ones
    unstated = [loader.load(QUICKSTART, [f"adapter.type={kind}"]) for kind in ("adalora", "qadalora")]
    assert verify_resume.shortened(unstated[0]) == verify_resume.shortened(unstated[1])
    assert not [
        text for text in measured_run.length(3, 1, loader.load(QUICKSTART).adapter) if "adapter" in text
    ]


@pytest.mark.soak
def test_what_a_step_computes_twice_is_counted(small, two_layers, tmp_path, monkeypatch) -> None:
    """And the head for tokens without a loss; the model's own FLOPs stay what they were."""
    traces: list[profiler.Trace] = []

    class Kept(profiler.Trace):
        def __init__(self, cuda: bool) -> None:
            super().__init__(cuda)
            traces.append(self)

    monkeypatch.setattr(profiler, "Trace", Kept)
    given = [*small, f"model.name={two_layers}", "eval.forgetting=false", "train.effective_batch_size=4"]
    work = []
    for index, more in enumerate(([], ["speed.activation_checkpointing=full"], ["speed.loss=trl"])):
        found = profiler.run(str(QUICKSTART), [*given, *more], str(tmp_path / str(index)))
        assert found.roofline and found.model and 0 < found.model < found.roofline[0]
        ran = trace_analysis.computed(traces[-1].profiler.events(), cuda=False)
        work.append(sum(trace_analysis.flops(each.operation) for each in ran if each.kind == "products"))
    plain, again, all_tokens = work
    assert again > 1.15 * plain and all_tokens > 1.05 * plain
    assert len({(trace.computed, trace.scored) for trace in traces}) == 1


@pytest.mark.soak
def test_a_run_that_waits_for_data_says_so(small, two_layers, tmp_path) -> None:
    given = [small[0], "data.validation=null", f"model.name={two_layers}", "eval.forgetting=false"]
    given += ["eval.samples=0"]
    given += ["train.max_steps=3", "train.warmup_steps=0", "train.effective_batch_size=8"]
    waited = {}
    for name, callbacks in (("slow", [SlowLoader()]), ("fast", [])):
        loaded = loader.load(QUICKSTART, [*given, f"train.output_dir={tmp_path / name}"])
        run = pipeline.run(loaded, verbosity="quiet", callbacks=callbacks)
        waited[name] = [
            json.loads(line)["data_wait"] for line in (run.path / "metrics.jsonl").read_text().splitlines()
        ]
    assert min(waited["slow"]) > 0.05 and len(waited["slow"]) == 3 and waited["fast"][-1] < 0.5
    assert "steps waited for data" in (tmp_path / "slow" / "log.txt").read_text()
    assert "steps waited for data" not in (tmp_path / "fast" / "log.txt").read_text()


def test_a_wait_for_data_is_said_while_it_can_be_changed(small, two_layers, tmp_path, monkeypatch) -> None:
    """Once; and what is logged and saved after a step is no wait."""
    monkeypatch.setattr(step_metrics, "COUNTED", 2)
    given = [small[0], "data.validation=null", f"model.name={two_layers}", "eval.forgetting=false"]
    given += ["eval.samples=0", "train.max_steps=5", "train.warmup_steps=0", "train.effective_batch_size=8"]
    given += ["train.logging_steps=1"]
    loaded = loader.load(QUICKSTART, [*given, f"train.output_dir={tmp_path / 'slow'}"])
    log = (pipeline.run(loaded, verbosity="quiet", callbacks=[SlowLoader()]).path / "log.txt").read_text()
    said = re.findall(r"note: the last (\d) steps waited for data", log)
    assert said == ["2"] and log.index("the last 2 steps") < log.index("note: steps waited for data")

    save = training_state.save

    def slowly(trainer: Any) -> None:
        time.sleep(0.5)
        save(trainer)

    monkeypatch.setattr(training_state, "save", slowly)
    given += ["train.save_strategy=steps", "train.save_steps=1"]
    loaded = loader.load(QUICKSTART, [*given, f"train.output_dir={tmp_path / 'saved'}"])
    run = pipeline.run(loaded, verbosity="quiet")
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert max(line["data_wait"] * line["step_seconds"] for line in lines[1:]) < 0.3
    assert lines[1]["step_seconds"] > 0.5  # a step's time is all that went by
    assert "waited for data" not in (run.path / "log.txt").read_text()


def test_the_command_says_verdict_and_lever(small, two_layers, tmp_path, capsys) -> None:
    given = [*small, f"model.name={two_layers}", "eval.forgetting=false", "train.effective_batch_size=2"]
    words = ["profile", str(QUICKSTART), *given, "--output", str(tmp_path / "out"), "--json"]
    tables.assert_tables_fit(lambda: main.main(words))
    out, text = capsys.readouterr()
    assert set(json.loads(out)["result"]) == documented_fields("profile")
    assert "verdict:" in text and "suggestion:" in text and "padding:" in text and "idle " in text
    assert "roofline: GEMMs reach" in text and "memory snapshot: none on the CPU" in text
    assert (tmp_path / "out" / "trace.json").exists()


def test_a_recipe_that_is_refused_leaves_no_folder(tmp_path, monkeypatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise UserError(Problem("no"))

    monkeypatch.setattr(pipeline, "run", refuses)
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        assert main.main(["profile", str(QUICKSTART), "--output", str(tmp_path / name)]) == 2
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_a_verdict_is_about_what_could_be_had_back() -> None:
    even = {"products": 0.75, "attention": 0.15, "memory-bound": 0.05, "communication": 0.0}
    even |= {"data wait": 0.02, "launch gaps": 0.03}
    whole = loader.load(QUICKSTART)
    made, on_cpu = planner.make(whole, GPU, 1), planner.make(whole, CPU, 1)
    judge = partial(recommendations.judge, whole=whole, made=made)
    verdict, lever = judge(even, 0.0, "flash_attention_4")
    assert "no other part is large" in verdict and lever == "model.quantization: fp8"
    near = judge(even, 0.0, "flash_attention_4", reached=(0.71, "989 TFLOP/s, from its data sheet"))
    assert near[0].endswith("GEMMs reach 71% of 989 TFLOP/s, from its data sheet")
    assert "padding" in judge(even, 0.4, "flash_attention_4")[0]
    talk = {**even, "communication": 0.3, "products": 0.45}
    assert "between processes" in judge(talk, 0.0, "flash_attention_4")[0]
    passes = {**even, "memory-bound": 0.5, "products": 0.3}
    assert "memory-bound kernels" in judge(passes, 0.0, "flash_attention_4")[0]
    assert "sdpa attention" in judge(even, 0.0, "sdpa")[0]
    assert "sdpa attention" not in recommendations.judge(even, 0.0, "sdpa", whole, on_cpu)[0]


def test_a_lever_is_not_what_is_so_already() -> None:
    """Nor what the recipe would then be refused for."""
    gaps = {"products": 0.4, "attention": 0.1, "memory-bound": 0.1, "communication": 0.0}
    data, gaps = gaps | {"data wait": 0.4, "launch gaps": 0.0}, gaps | {"data wait": 0.0, "launch gaps": 0.4}

    def lever(
        found: dict[str, float], *more: str, machine: detection.Hardware = GPU, padding: float = 0
    ) -> str:
        whole = loader.load(QUICKSTART, list(more))
        said = recommendations.judge(
            found, padding, "flash_attention_4", whole, planner.make(whole, machine, 1)
        )[1]
        first = re.findall(r"(\w+\.\w+): (\w+)", said.partition(" or ")[0])
        more = (*more, *(f"{key}={value}" for key, value in first if value != "one"))
        split_batch(loader.load(QUICKSTART, list(more)).train, 1)
        return said

    with (
        pytest.MonkeyPatch.context() as launched
    ):  # as a run counts: workers by machine, rows by who has his own
        for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
            launched.setenv(name, value)
        assert lever(data) == "train.dataloader_num_workers: 4 (now 2)"
        shared = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "4"}
        for name, value in shared.items():
            launched.setenv(name, value)
        assert "train.effective_batch_size: " in recommendations.more_rows(
            loader.load(QUICKSTART, ["train.effective_batch_size=2"]), True
        )
    assert lever(data, machine=CPU) == "train.dataloader_num_workers: 2"
    assert lever(data) == "train.dataloader_num_workers: 4 (now 2)"
    assert lever(data, "train.dataloader_num_workers=12") == "train.dataloader_num_workers: 16 (now 12)"
    assert "more CPU cores" in lever(data, "train.dataloader_num_workers=2", machine=CPU)
    both = "train.effective_batch_size: 8 and train.per_device_train_batch_size: 8"
    assert lever(gaps, "train.effective_batch_size=1") == f"{both}; or data.packing: true"
    assert lever(gaps, "train.effective_batch_size=1", "data.packing=true") == both
    assert lever(gaps, "train.effective_batch_size=1", machine=CPU) == both, (
        "a CPU is slower with packed rows"
    )
    tiny = ["train.effective_batch_size=32", "train.per_device_train_batch_size=1"]
    assert lever(gaps, *tiny).startswith("train.per_device_train_batch_size: 8; ")
    assert lever(gaps, tiny[0]).startswith("train.per_device_train_batch_size: 16; ")
    assert lever(gaps, tiny[0], "train.per_device_train_batch_size=32").startswith(
        "train.effective_batch_size: 64 and train.per_device_train_batch_size: 64; "
    )
    found = lever(gaps, tiny[0], "train.per_device_train_batch_size=auto")
    assert found.startswith("train.effective_batch_size: 64, if the memory suffices")
    padded = {**data, "data wait": 0.0, "products": 0.8}
    assert "data.packing" in lever(padded, padding=0.4)
    assert "data.max_length" in lever(padded, "data.packing=true", padding=0.4)
    grouped = "train.train_sampling_strategy=group_by_length"
    assert lever(padded, padding=0.4, machine=CPU) == grouped.replace("=", ": ")
    assert "lower train.per_device_train_batch_size" in lever(padded, grouped, padding=0.4, machine=CPU)
    passes = {**padded, "products": 0.2, "memory-bound": 0.7}
    assert lever(passes) == "speed.compile: true"
    assert lever(passes, "speed.fused=false") == "speed.compile: true and speed.fused: auto"
    assert "faster memory" in lever(passes, "speed.compile=true")
    good = {**padded, "products": 0.9, "memory-bound": 0.0}
    assert lever(good) == "model.quantization: fp8"
    assert lever(good, "model.quantization=fp8") == lever(good, "adapter.type=full") == "use a faster machine"
