"""What a checkpoint holds the run to that goes on from it, and what it hands on."""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.autoconfig.batch_size import split_batch
from finetune.checkpointing import resume_contract
from finetune.core import run_checks
from finetune.core.errors import UserError
from finetune.evaluation import results
from finetune.preflight import choice_checks
from finetune.recipe import loader
from finetune.recipe.schema import Eval
from finetune.speed import live_model_spec
from finetune.training import load_data, model_setup, resume_facts, speed_setup, step_work, training_arguments
from finetune.training.run_context import RunData
from support.paths import DATA, QUICKSTART
from support.trainers import run_context


def test_activations_may_wait_elsewhere_and_the_optimizer_may_not() -> None:
    moves = [("none", "auto"), ("activations:4", "none"), ("all", "optimizer")]
    for then, now in [*moves, ("none", "optimizer"), ("all", "activations")]:
        both = [{"recipe": {"speed.offload": one}, "facts": {}, "chosen": {}} for one in (then, now)]
        refused = pytest.raises(UserError, match=r"speed\.offload")
        with contextlib.nullcontext() if (then, now) in moves else refused:
            assert "speed.offload" in resume_contract.compare(both[0], both[1], Path("step-3"))[0]


def test_changed_recipe_names_both_values_and_the_overrides_that_restore_it() -> None:
    saved = {"adapter.r": 16, "adapter.target_modules": ["q_proj", "v_proj"], "train.learning_rate": 0.004}
    now = {"adapter.r": 8, "train.learning_rate": 0.004, "train.weight_decay": 0.1}
    then, today = ({"recipe": recipe, "facts": {}, "chosen": {}} for recipe in (saved, now))
    with pytest.raises(UserError, match=r"adapter\.r +16 +8\n") as raised:
        resume_contract.compare(then, today, Path("step-3"))
    overrides = "adapter.r=16 'adapter.target_modules=[q_proj, v_proj]' train.weight_decay=null"
    assert raised.value.problems[0].fix.startswith(f"add {overrides} to the command, or start a new run")


def test_line_break_in_a_key_of_a_checkpoint_makes_no_line(tmp_path) -> None:
    then = {"recipe": {"x\x1b[31m\nerror: forged": "y"}, "facts": {}, "chosen": {}}
    with pytest.raises(UserError) as raised:
        resume_contract.compare(then, {"recipe": {}, "facts": {}, "chosen": {}}, Path("step-3"))
    text = str(raised.value)
    assert "\x1b" not in text and not re.search(r"^\s*error: forged", text, re.MULTILINE)


def test_weight_and_place_of_a_source_are_part_of_the_contract(tmp_path) -> None:
    """Another mix of the same files, or another order, is another training."""
    rows = (DATA / "train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("a", rows[:4]), ("b", rows[4:8]), ("moved", rows[4:8])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))

    def contract(*names: Any) -> dict[str, Any]:
        sources = [{"name": f"{tmp_path}/{name}.jsonl", "weight": weight} for name, weight in names]
        found = loader.load(QUICKSTART, [f"data.name={json.dumps(sources)}", "data.validation=null"])
        setup, (tokenizer, prepared) = (
            choice_checks.setup_of(found),
            load_data.prepare_data(found),
        )
        return resume_contract.contract(found.model_dump(mode="json"), setup, {}, tokenizer, prepared.content)

    kept = {**contract(("a", 1), ("b", 2)), "chosen": {}}
    for other in ([("a", 2), ("b", 1)], [("b", 2), ("a", 1)]):
        with pytest.raises(UserError, match="data: content") as raised:
            resume_contract.compare(kept, contract(*other), tmp_path)
        assert raised.value.code == 4
    (note,) = resume_contract.compare(kept, contract(("a", 1), ("moved", 2)), tmp_path)
    assert note.startswith("data.name: ")


def test_a_stream_s_workers_are_part_of_the_contract(tmp_path) -> None:
    """Each reads its own shards, so that their number decides on the order of rows."""
    more = ["data.streaming=true", "data.validation=null", "train.max_steps=2"]
    found = loader.load(QUICKSTART, more)
    setup, (tokenizer, prepared) = (
        choice_checks.setup_of(found),
        load_data.prepare_data(found),
    )

    def contract(workers: int) -> dict[str, Any]:
        given: Any = SimpleNamespace(dataloader_num_workers=workers)
        data = RunData(tokenizer, prepared, given)
        batch = split_batch(found.train, 1)
        return {**resume_facts.contract_of(found, setup, data, batch, 2, None), "chosen": {}}

    assert not resume_contract.compare(contract(1), contract(1), tmp_path)
    with pytest.raises(UserError, match=r"train\.dataloader_num_workers +1 +2"):
        resume_contract.compare(contract(1), contract(2), tmp_path)


def test_a_dry_run_is_held_to_the_checkpoint_too(train, capsys) -> None:
    run = train("--until", "1", code=75)
    again = [f"train.output_dir={run.path}", "--resume"]
    for dry in ([], ["--dry-run"]):
        capsys.readouterr()
        train(*again, "train.learning_rate=5e-3", *dry, code=4)
        assert "the settings differ from those of the run to resume" in capsys.readouterr().err
    train(*again, "--dry-run")


def test_what_auto_became_is_compared() -> None:
    def run(**chosen: Any) -> dict[str, Any]:
        return {"recipe": {"speed.loss": "auto"}, "facts": {}, "chosen": {"speed.compile": True, **chosen}}

    one = run(**{"speed.loss": "chunked", "speed.activation_checkpointing": "mlp_int8:6"})
    other = run(**{"speed.loss": "fused", "data.name": "x", "speed.activation_checkpointing": "mlp_int8"})
    rounded, note = resume_contract.chosen_anew(one, other)
    assert 'speed.loss: auto chose "chunked" before and "fused" now' in note and "about 1%" in rounded
    other["recipe"] = {"speed.loss": "fused"}  # asked for: `compare` has said so
    assert resume_contract.chosen_anew(one, other) == [rounded]


OF_TASKS = ("apply_chat_template", "engine", "limit", "num_fewshot")


@pytest.mark.parametrize(
    ("metric", "kept"),
    [("loss", ()), ("exact_match", ("generate", "max_new_tokens")), ("arc_easy/acc", OF_TASKS)],
)
@pytest.mark.parametrize("key", ["generate", "max_new_tokens", *OF_TASKS])
def test_what_defines_the_deciding_metric_stays(
    metric: str, kept: tuple[str, ...], key: str, tmp_path
) -> None:
    """Scores of other questions or of longer answers can't be compared with those before the stop."""

    def contract(value: int, **given: Any) -> dict[str, Any]:
        section = {"eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": metric, **given}
        recipe = {f"eval.{name}": one for name, one in (section | {key: value}).items()}
        return {"recipe": recipe, "facts": {}, "chosen": {}}

    if key in kept:
        with pytest.raises(UserError, match=rf"eval\.{key} "):
            resume_contract.compare(contract(1), contract(2), tmp_path)
    else:
        (note,) = resume_contract.compare(contract(1), contract(2), tmp_path)
        assert f"eval.{key}: 1 in the checkpoint, now 2" in note
    for never in ({"eval_steps": None}, {"load_best_model_at_end": False}):  # the metric decides nothing
        assert resume_contract.compare(contract(1, **never), contract(2, **never), tmp_path)


def test_files_of_the_deciding_task_are_part_of_the_contract(task_files) -> None:
    def files(metric: str, *tasks: str) -> dict[str, str]:
        return results.metric_files(Eval(eval_steps=2, tasks=list(tasks), metric_for_best_model=metric))

    first, second = task_files[:2]
    name = next(iter(results.files_hashed(Eval(tasks=[first]))))
    before = files(f"{name}/acc", first)
    assert len(before) == 1 and before == files(f"{name}/acc", first, second)
    assert not files("loss", first) and not files("exact_match", first)
    path = Path(first)
    path.write_text(path.read_text() + "\n# changed\n")
    assert before.keys() == files(f"{name}/acc", first).keys() and before != files(f"{name}/acc", first)


def test_a_changed_patience_is_not_taken_for_the_same_run(tmp_path) -> None:
    """A run that came to its end by it would stay ended."""
    one, other = ({"recipe": {"eval.early_stopping_patience": n}, "facts": {}, "chosen": {}} for n in (2, 5))
    with pytest.raises(UserError, match=r"eval\.early_stopping_patience"):
        resume_contract.compare(one, other, tmp_path)


def test_what_auto_recomputed_is_recomputed_again(tmp_path) -> None:
    """The memory that is free today is not asked: other layers would be rounded."""
    one = loader.load(QUICKSTART, ["speed.compile=false"])
    setup = choice_checks.setup_of(one)
    arguments = training_arguments.training_arguments(one.train, one.data, setup, split_batch(one.train, 1))
    tokenizer, prepared = load_data.prepare_data(one)

    def asked_for(checkpointing: str, offload: str) -> dict[str, Any]:
        asked = {"speed.activation_checkpointing": checkpointing, "speed.offload": offload}
        return {
            "recipe": asked,
            "facts": {"hardware": "x"},
            "chosen": {**asked, "speed.activation_checkpointing": "full:3"},
        }

    def resumed(name: str) -> tuple[int, run_checks.Choice]:
        found: Any = SimpleNamespace(contract={**asked_for("auto", "auto"), "facts": {"hardware": name}})
        run = run_context(one, setup, found=found)
        model = model_setup.adapted_model(run, RunData(tokenizer, prepared, arguments), 2)
        work = step_work.work_of(model, one, setup, 64, 1.0)
        fast = speed_setup.make_fast(run, model, arguments, work)
        count = sum(layer.gradient_checkpointing for layer in live_model_spec.decoder_layers(model))
        return count, fast["speed.activation_checkpointing"]

    assert resumed(setup.hardware.name) == (3, run_checks.Choice("full:3", speed_setup.AS_BEFORE))
    assert resumed("another GPU")[0] == 0, "its memory is another"
    for then, now, kept in (
        (("auto", "auto"), ("auto", "auto"), {"activation_checkpointing", "offload"}),
        (("auto", "activations"), ("auto", "activations"), {"activation_checkpointing"}),
        (("full", "auto"), ("full", "auto"), {"offload"}),
        (("auto", "auto"), ("auto", "activations"), set()),  # by which another part has to be recomputed
        (("auto", "auto"), ("auto", "none"), set()),
        (("auto", "none"), ("auto", "auto"), set()),
    ):
        found: Any = SimpleNamespace(contract=asked_for(*then))
        keys = ("activation_checkpointing", "offload")
        asked = one.speed.model_copy(update=dict(zip(keys, now, strict=True)))
        made, keys = resume_contract.as_chosen(asked, found, "x")
        assert keys == kept and (made == asked or kept)
        assert made.activation_checkpointing == ("full:3" if "activation_checkpointing" in kept else now[0])
    assert resume_contract.as_chosen(one.speed, None, "x") == (one.speed, set())


@pytest.mark.parametrize(
    ("asked", "compiled", "graphs", "kept"),
    [
        ("auto", True, "on", "reduce-overhead"),
        (True, True, "off", "default"),  # with more memory free than then
        ("auto", False, "off", "auto"),
        ("max-autotune", "max-autotune", "on", "max-autotune"),
    ],
)
def test_what_was_recorded_as_graphs_is_so_again(asked, compiled, graphs: str, kept) -> None:
    speed = loader.load(QUICKSTART).speed.model_copy(update={"compile": asked})
    chosen = {"speed.compile": compiled, "speed.graphs": graphs}
    plain = {"speed.activation_checkpointing": "auto", "speed.offload": "auto"}
    found: Any = SimpleNamespace(contract={"recipe": plain, "facts": {"hardware": "x"}, "chosen": chosen})
    made, keys = resume_contract.as_chosen(speed, found, "x")
    assert made.compile == kept and keys == ({"compile"} if kept != asked else set())
    assert resume_contract.as_chosen(speed, found, "another GPU")[0] == speed


def test_loss_that_auto_chose_is_the_loss_of_the_resumed_run() -> None:
    """Also where an older finetune had no `chunked_fp8`, and if the recipe asks for other checkpointing."""
    speed = loader.load(QUICKSTART).speed
    for chosen in ("chunked", "chunked_fp8", "trl", None):
        for checkpointing in ("auto", "full"):
            contract = {
                "recipe": {"speed.activation_checkpointing": checkpointing, "speed.offload": "auto"},
                "facts": {"hardware": "x"},
                "chosen": {"speed.loss": chosen} if chosen else {},
            }
            found: Any = SimpleNamespace(contract=contract)
            made, keys = resume_contract.as_chosen(speed, found, "x")
            is_kept = chosen in ("chunked", "chunked_fp8")
            assert made.loss == (chosen if is_kept else "auto") and ("loss" in keys) == is_kept
            requested = speed.model_copy(update={"loss": "trl"})
            assert resume_contract.as_chosen(requested, found, "x")[0].loss == "trl"


def test_resumed_run_names_the_effect_of_another_loss() -> None:
    one, other = (
        {"recipe": {"speed.loss": "auto"}, "facts": {}, "chosen": {"speed.loss": loss}}
        for loss in ("chunked", "chunked_fp8")
    )
    assert "fp8, which changes gradients by about 3%" in "".join(resume_contract.chosen_anew(one, other))


def of_an_older_finetune(facts: dict[str, Any], **recipe: Any) -> list[dict[str, Any]]:
    """Its contract, and today's of the same recipe and files."""
    held = {f"data.{key}": value for key, value in recipe.items()}
    today = dict.fromkeys(resume_contract.TOKEN_IDS, "e048")
    facts |= {"versions.finetune-toolkit": "0.0.9", "versions.tokenizers": "0.23.3"}
    return [{"recipe": held, "facts": one, "chosen": {}} for one in (facts, {**facts, **today})]


def test_run_whose_validation_set_an_older_finetune_drew_is_refused(tmp_path) -> None:
    """It states no token ids: the run may have trained on examples that are in the validation set now."""
    kept, now = of_an_older_finetune({}, validation_fraction=0.1)
    with pytest.raises(UserError, match="an older version started the run") as raised:
        resume_contract.compare(kept, now, tmp_path)
    assert raised.value.code == 4 and "finetune-toolkit 0.0.9" in str(raised.value)
    kept, now = of_an_older_finetune({})
    notes = resume_contract.compare(kept, now, tmp_path)
    assert [note.partition(": finetune can't compare")[0] for note in notes] == list(
        resume_contract.TOKEN_IDS
    )


def test_run_whose_token_ids_are_others_now_is_refused_with_the_versions_that_made_them(tmp_path) -> None:
    facts: dict[str, Any] = dict.fromkeys(resume_contract.TOKEN_IDS, "312b")
    kept, now = of_an_older_finetune(facts, validation_fraction=0.1)
    with pytest.raises(UserError, match=r"the versions .* \(finetune-toolkit 0\.0\.9") as raised:
        resume_contract.compare(kept, now, tmp_path)
    assert raised.value.code == 4


def test_options_of_the_adapter_to_continue_from_are_part_of_the_contract(saved_lora) -> None:
    recipe = loader.load(QUICKSTART, [f"adapter.init_from={saved_lora}"])
    before = resume_facts._config_facts(recipe)
    config = json.loads((path := saved_lora / "adapter_config.json").read_text())
    path.write_text(
        json.dumps({**config, "target_modules": [*config["target_modules"]][::-1], "revision": "b"})
    )
    assert resume_facts._config_facts(recipe) == before
    for key, value in (("lora_alpha", 9), ("lora_dropout", 0.5), ("alpha_pattern", {"q_proj": 800})):
        path.write_text(json.dumps({**config, key: value}))
        then, now = (
            {"recipe": {}, "facts": one, "chosen": {}} for one in (before, resume_facts._config_facts(recipe))
        )
        with pytest.raises(UserError, match=f"config of adapter.init_from: {key}"):
            resume_contract.compare(then, now, Path("step-3"))
