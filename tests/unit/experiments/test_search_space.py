"""A space of recipes: what is refused, and where; what is drawn; what can't run here; a W&B sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import optuna
import pytest
import yaml

from finetune.cli import main
from finetune.core import strict_yaml
from finetune.core.errors import Exit, UserError
from finetune.experiments.runner import kept_runs, varied_keys
from finetune.experiments.sweep import search_space, search_space_checks, wandb_sweep
from finetune.recipe import loader
from support.paths import DATA, QUICKSTART, ROOT

if TYPE_CHECKING:
    from finetune.experiments.sweep.search_space import Space


def space(tmp_path: Path, text: str) -> Space:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return search_space.read(path)


def said(raised: pytest.ExceptionInfo[UserError]) -> str:
    return "\n".join(map(str, raised.value.problems))


def test_every_mistake_in_a_space_is_said_at_once_with_its_place(tmp_path) -> None:
    with pytest.raises(UserError) as raised:
        space(
            tmp_path,
            "search: {pruner: medain, evaluations: 0}\n"
            "spce: {}\n"
            "space:\n"
            "  rank: {low: 4, high: 8}\n"
            "  adapter.r: {low: 8, hihg: 4}\n"
            "  adapter.lora_alpha: {low: 8, high: 4}\n"
            "  train.learning_rate: {low: 0, high: 1, log: true}\n"
            "  train.optim: {choices: [lion_32bit, lion_32bit]}\n"
            "  train.seed: {choices: [1, 2]}\n"
            "  data.train_on: {choices: [all]}\n"
            "  adapter.type: {choices: [lora], times: adapter.r}\n"
            "  train.warmup_steps: {low: 1}\n",
        )
    text = said(raised)
    for place, what in (
        (":2:1", "unknown section"),
        (":1:10", "median"),
        (":1:26", "evaluations"),
        (":4:3", "recipes have no such key"),
        (":5:23", "high"),
        (":6:24", "`low` is not below `high`"),
        (":7:42", "above 0"),
        (":8:39", "a choice is listed twice"),
        (":9:3", "all runs use the recipe's seed"),
        (":10:3", "same validation set"),
        (":11:35", "`times` needs numbers"),
        (":12:3", "either a range (low and high) or choices"),
    ):
        assert any(place in line and what in text for line in text.splitlines()), (place, text)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("{low: 1.0e-4, high: 0.3, step: 0.1}", "high: 0.2001 or 0.3001"),
        ("{low: 0.1, high: 0.35, step: 0.3}", "high: 0.4"),
        ("{low: 4, high: 30, step: 5}", "high: 29 or 34"),
        ("{low: 0.1, high: 0.7, step: 0.1}", ""),
        ("{low: 0.0, high: 0.3, step: 0.1}", ""),
    ],
)
def test_a_step_reaches_the_end_of_its_range(text: str, fix: str, tmp_path) -> None:
    """Else Optuna draws nothing near it."""
    path = tmp_path / "space.yaml"
    path.write_text(f"space:\n  train.weight_decay: {text}\n")
    problems = search_space.parse(path)[1]
    assert [problem.fix for problem in problems] == ([fix] if fix else [])
    assert all("do not reach `high`" in problem.what and ":2:" in problem.where for problem in problems)


@pytest.mark.parametrize("text", ["", "space: {}", "space: [1]", "space: {a: 1"])
def test_what_is_no_space_is_refused(text: str, tmp_path) -> None:
    with pytest.raises(UserError) as raised:
        space(tmp_path, text)
    assert raised.value.code == Exit.INPUT and "space.yaml" in said(raised)
    with pytest.raises(UserError, match="can't read"):
        search_space.read(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"# caf\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        search_space.read(tmp_path / "latin.yaml")


CORNERS = """
space:
  adapter.type: {choices: [lora, lroa]}
  adapter.r: {low: 0, high: 8}
  adapter.target_modules: {choices: [all-linear, [q_porj]]}
  train.learnin_rate: {low: 1.0e-5, high: 1.0e-3}
  train.effective_batch_size: {choices: [8, 0.3], times: train.effective_batch_size}
"""


def test_a_value_that_no_recipe_can_have_is_named_before_a_trial(tmp_path) -> None:
    """All of them, each with its place in the space."""
    with pytest.raises(UserError) as raised:
        search_space_checks.look(str(QUICKSTART), [], space(tmp_path, CORNERS))
    text = said(raised)
    for place, what in (
        (":3:34", "lora"),
        (":4:15", "at least 1"),
        (":5:50", "q_proj"),
        (":6:3", "learning_rate"),
    ):
        assert any(f"space.yaml{place}" in line for line in text.splitlines()) and what in text, text
    assert ":7:" in text and "an integer" in text


@pytest.mark.parametrize("kind", ["[dora]", "{dora: 1}", "[[dora]]", "{}", "null", "7", "''"])
def test_a_choice_that_is_no_name_of_an_adapter_type_is_an_error_at_its_place(kind: str, tmp_path) -> None:
    text = f"space:\n  adapter.type: {{choices: [lora, {kind}]}}\n  adapter.r: {{choices: [8, 16]}}\n"
    with pytest.raises(UserError) as raised:
        search_space_checks.look(str(QUICKSTART), [], space(tmp_path, text))
    assert ":2:34" in said(raised) and "adapter.type" in said(raised)


HUGE = {
    "steps": "train.learning_rate: {low: 0.0, high: 1.0, step: 1e-9}",
    "integers": "adapter.lora_alpha: {low: 1, high: 1000000000, times: adapter.r}",
    "choices": f"adapter.r: {{choices: [{', '.join(map(str, range(1, 400)))}]}}",
    "an end": f"adapter.r: {{low: 1, high: {'9' * 350}, step: 1}}",
    "a factor": f"adapter.lora_alpha: {{choices: [1, {'9' * 350}], times: adapter.r}}",
}


@pytest.mark.parametrize("kind", HUGE)
def test_space_with_huge_numbers_or_many_values_is_refused(kind: str, tmp_path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(f"space:\n  {HUGE[kind]}\n")
    with pytest.raises(UserError, match=r"too many|out of range|needs numbers"):
        search_space.read(path)


def test_wide_range_of_integers_is_no_list_in_a_wandb_sweep() -> None:
    wide = search_space.Parameter(low=1, high=10**9)
    found = wandb_sweep.distribution("adapter.r", wide, loader.load(QUICKSTART))
    assert found == {"distribution": "int_uniform", "min": 1, "max": 10**9}


def test_a_number_that_is_not_there_to_be_multiplied_is_said_once(tmp_path) -> None:
    made = space(tmp_path, "space:\n  adapter.lora_alpha: {choices: [1, 2], times: adapter.rr}\n")
    with pytest.raises(UserError) as raised:
        search_space_checks.corners(str(QUICKSTART), [], loader.load(QUICKSTART), made)
    (problem,) = raised.value.problems
    assert ":2:41" in problem.where and problem.fix == "adapter.r"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["adapter.type=ia3"], "the adapter type ia3 has no r"),
        (["train.effective_batch_size=9"], "4.5 (number) = 0.5 x train.effective_batch_size (9)"),
    ],
)
def test_what_the_shipped_space_multiplies_is_said(given: list[str], says: str) -> None:
    shipped, loaded = search_space.read(ROOT / "recipes" / "sweep.yaml"), loader.load(QUICKSTART, given)
    with pytest.raises(UserError) as raised:
        search_space_checks.corners(str(QUICKSTART), given, loaded, shipped)
    (problem,) = raised.value.problems
    assert says in str(problem) and problem.fix and "--space" in problem.fix


def test_mistakes_of_the_file_and_of_its_values_are_said_together(tmp_path, capsys) -> None:
    (tmp_path / "space.yaml").write_text(
        "space:\n  adapter.lora_alpha: {times: adapter.r}\n  adapter.r: {low: 8, high: 4}\n"
        "  train.learning_rat: {low: 1, high: 2}\n"
        "  train.optim: {choices: [adamw_torch, nosuch]}\n"
    )
    words = [
        "sweep",
        str(QUICKSTART),
        "--space",
        str(tmp_path / "space.yaml"),
        "--output",
        str(tmp_path / "s"),
    ]
    assert main.main(words) == 2
    error = capsys.readouterr().err
    assert (
        "`low` is not below `high`" in error
        and "train.learning_rat: unknown key" in error
        and "nosuch" in error
    )


def test_rows_are_known_by_their_content(small, tmp_path) -> None:
    rows = Path(small[0].partition("=")[2])
    for name, text in (("same", rows.read_text()), ("other", rows.read_text().replace("euros", "francs"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / rows.name).write_text(text)
    names = [rows, *(tmp_path / name / rows.name for name in ("same", "other"))]
    one, same, other = (
        search_space_checks.rows_of(loader.load(QUICKSTART, [small[1], f"data.name={name}"]))
        for name in names
    )
    assert one == same and one[0] == 96 and other[1] != one[1]


def test_what_this_machine_cannot_run_is_left_out_with_its_reason(small, tmp_path) -> None:
    asked = space(tmp_path, "space: {train.optim: {choices: [adamw_torch_fused, paged_adamw_8bit]}}")
    found = search_space_checks.look(str(QUICKSTART), list(small), asked)
    assert found.space.parameters["train.optim"].choices == ["adamw_torch_fused"]
    assert any("the sweep skips paged_adamw_8bit: " in note for note in found.notes)
    assert found.rows == 96 and found.device == "cpu"
    assert found.unsaid == {"train.optim": "adamw_torch_fused"}
    only = space(tmp_path, "space: {train.optim: {choices: [paged_adamw_8bit]}}")
    with pytest.raises(UserError) as raised:
        search_space_checks.look(str(QUICKSTART), list(small), only)
    assert raised.value.code == Exit.ENVIRONMENT


def test_what_is_drawn_is_a_recipe(tmp_path) -> None:
    """Types first; keys that the type lacks are not drawn; multiples of the recipe's and of drawn values."""
    asked = space(
        tmp_path,
        "space:\n"
        "  adapter.lora_alpha: {choices: [1, 2], times: adapter.r}\n"
        "  adapter.r: {low: 4, high: 12, step: 4}\n"
        "  train.learning_rate: {low: 0.1, high: 10, log: true, times: train.learning_rate}\n"
        "  train.effective_batch_size: {choices: [0.5, 2], times: train.effective_batch_size}\n"
        "  adapter.target_modules: {choices: [all-linear, [q_proj, v_proj]]}\n"
        "  adapter.type: {choices: [lora, ia3]}\n",
    )
    own = loader.load(QUICKSTART)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    kinds = set()
    for _ in range(12):
        values = search_space.draw(study.ask(), asked, own)
        loaded = loader.load(QUICKSTART, search_space.overrides(values))
        kinds.add(values["adapter.type"])
        assert next(iter(values)) == "adapter.type"
        assert 4e-4 <= values["train.learning_rate"] <= 4e-2
        assert loaded.train.effective_batch_size in (4, 16)
        assert {key: search_space.own_value(loaded, key) for key in values} == values
        if values["adapter.type"] == "lora":
            assert values["adapter.r"] in (4, 8, 12)
            assert values["adapter.lora_alpha"] in (values["adapter.r"], 2 * values["adapter.r"])
        else:
            assert "adapter.r" not in values and "adapter.lora_alpha" not in values
    assert kinds == {"lora", "ia3"}
    assert search_space.own_draw(asked, own, {}) == {
        "adapter.type": "lora",
        "train.learning_rate": 1.0,
        "adapter.target_modules": "all-linear",
        "adapter.lora_alpha": "2",
    }  # of r and the batch the space has not the recipe's own


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("train.warmup_steps: {low: 0, high: 20}", []),  # the recipe's is 0.03
        ("adapter.lora_alpha: {low: 1, high: 4, times: adapter.r}", []),  # 24 is 1.5 times 16
        ("adapter.r: {low: 4, high: 29, step: 5}", []),
        ("train.learning_rate: {low: 0.0, high: 0.09, step: 0.03}", []),
        ("adapter.r: {low: 4, high: 32, step: 4}", ["adapter.r"]),
        ("train.learning_rate: {low: 0.0, high: 0.1, step: 0.001}", ["train.learning_rate"]),
    ],
)
def test_a_value_between_two_of_a_range_stays_the_recipe_s(given: str, kept: list[str], tmp_path) -> None:
    """The first trial has it: Optuna would have taken the next whole number, or one off the steps."""
    own = loader.load(QUICKSTART, ["adapter.lora_alpha=24", "train.warmup_steps=0.03"])
    asked = space(tmp_path, f"space:\n  {given}\n")
    drawn = search_space.own_draw(asked, own, {})
    assert [*drawn] == kept
    study = optuna.create_study()
    study.enqueue_trial(drawn)
    values = search_space.draw(study.ask(), asked, own, [key for key in asked.parameters if key not in drawn])
    assert all(value == pytest.approx(search_space.own_value(own, key)) for key, value in values.items())


@pytest.mark.parametrize(
    "value",
    ["lora", "no-such", "1e-4", "null", "", "a b", 1, 0.1, None, True, ["q_proj", 1.5], {"a": [1, "x"]}],
)
def test_a_value_is_read_back_as_it_was(value: object) -> None:
    text = varied_keys.text_of(value)
    assert strict_yaml.parse(text, "-").value == value


def test_the_shipped_space_is_one_for_the_quickstart(small) -> None:
    asked = search_space.read(ROOT / "recipes" / "sweep.yaml")
    found = search_space_checks.look(str(QUICKSTART), list(small), asked)
    own = search_space.own_draw(found.space, loader.load(QUICKSTART), found.unsaid)
    assert [key for key in asked.parameters if key not in own] == ["train.warmup_steps"]  # 12 steps
    kept = {key: len(one.choices or ()) for key, one in found.space.parameters.items()}
    assert (
        kept["adapter.type"] == 2 and kept["train.optim"] == 3
    )  # bitsandbytes has its optimizers for the CPU


def test_the_space_as_a_sweep(tmp_path, capsys) -> None:
    target = tmp_path / "sweep.yaml"
    assert main.main(["sweep", str(QUICKSTART), "train.seed=7", "--export-wandb", str(target)]) == 0
    assert "can't multiply by adapter.r" in capsys.readouterr().out
    found = yaml.safe_load(target.read_text())
    assert found["metric"] == {"name": "eval/loss", "goal": "minimize"} and found["method"] == "bayes"
    rate = found["parameters"]["train.learning_rate"]
    assert rate == {"distribution": "log_uniform_values", "min": 4e-4, "max": 4e-2}
    assert found["parameters"]["train.effective_batch_size"] == {"values": [4, 8, 16]}
    assert found["parameters"]["adapter.target_modules"]["values"] == ["all-linear", "[q_proj, v_proj]"]
    assert found["command"][:3] == ["finetune", "train", str(QUICKSTART)]
    assert "train.seed=7" in found["command"] and found["command"][-1] == "${args_no_hyphens}"
    own = ["speed.compile=false", "train.save_strategy=no", "publish.repo=null", "eval.tasks=[]"]
    own += ["eval.forgetting=false", "eval.generate=false", "train.output_dir=null"]
    assert {*own} <= {*found["command"][found["command"].index("train.seed=7") :]}, "after what was given"


def test_a_sweep_draws_what_a_study_can(tmp_path) -> None:
    """Its own steps count from 0, and know nothing of what a value is multiplied by."""
    text = """
search: {sampler: random}
space:
  train.max_steps: {low: 1, high: 9, step: 2}
  train.effective_batch_size: {low: 1, high: 4, times: train.effective_batch_size}
  train.weight_decay: {low: 0.1, high: 0.7, step: 0.2}
  train.learning_rate: {low: 0.5, high: 2, step: 0.5, times: train.learning_rate}
  adapter.r: {low: 1, high: 4, log: true, times: adapter.r}
  adapter.alpha: {low: 4, high: 64, log: true}
  train.gradient_accumulation_steps: {low: 1, high: 9}
"""
    asked, own = space(tmp_path, text), loader.load(QUICKSTART)
    found = yaml.safe_load(wandb_sweep.sweep(asked, own, str(QUICKSTART), [])[0])["parameters"]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    drawn = [search_space.draw(study.ask(), asked, own) for _ in range(60)]
    for key in list(asked.parameters)[:4]:
        assert {*found[key]["values"]} == {one[key] for one in drawn}
    assert found["train.max_steps"] == {"values": [1, 3, 5, 7, 9]}
    rank, size = own.adapter.ours("r"), own.train.effective_batch_size
    assert found["train.effective_batch_size"] == {"values": [size, 2 * size, 3 * size, 4 * size]}
    steps = {"distribution": "q_log_uniform_values", "min": rank, "max": 4 * rank, "q": rank}
    assert found["adapter.r"] == steps and {one["adapter.r"] % rank for one in drawn} == {0}
    assert found["adapter.alpha"] == steps | {"min": 4, "max": 64, "q": 1}
    assert found["train.gradient_accumulation_steps"] == {"distribution": "int_uniform", "min": 1, "max": 9}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("train.learing_rate: {low: 0.1, high: 1}", "learning_rate"),
        ("train.optim: {choices: [adamw_trch]}", "adamw_trch"),
        ("adapter.target_modules: {choices: [[v_porj]]}", "v_porj"),
    ],
)
def test_a_sweep_of_what_no_recipe_can_have_is_exit_2(key: str, said: str, small, tmp_path, capsys) -> None:
    """Its agents would each end with that."""
    asked = space(tmp_path, f"space:\n  {key}\n")
    words = ["sweep", str(QUICKSTART), *small, "--space", str(asked.path)]
    assert main.main([*words, "--export-wandb", str(tmp_path / "sweep.yaml")]) == Exit.INPUT
    text = capsys.readouterr().err
    assert said in text and "space.yaml:2:" in text and not (tmp_path / "sweep.yaml").exists()


@pytest.mark.parametrize(("stated", "steps"), [("null", 6), ("0.3", 8), ("5", 5)])
def test_a_sweep_of_epochs_is_evaluated_too(stated, steps, small, tmp_path, capsys) -> None:
    """Its metric would never be logged. What only this machine can't run stays, and is said."""
    asked = space(tmp_path, "space: {train.optim: {choices: [adamw_torch, paged_adamw_8bit]}}")
    given = [*small, "train.max_steps=null", "train.num_train_epochs=2", "train.effective_batch_size=8"]
    given.append(f"eval.eval_steps={stated}")
    words = ["sweep", str(QUICKSTART), *given, "--space", str(asked.path)]
    target = tmp_path / "sweep.yaml"
    assert main.main([*words, "--export-wandb", str(target)]) == 0
    found = yaml.safe_load(target.read_text())
    assert f"eval.eval_steps={steps}" in found["command"]  # of 24 steps: four times, or a share of the run
    assert found["parameters"]["train.optim"] == {"values": ["adamw_torch", "paged_adamw_8bit"]}
    assert "train.optim: not here: paged_adamw_8bit: a paged" in capsys.readouterr().out
    words += ["data.validation=null", "--export-wandb", str(target)]
    assert main.main(words) == Exit.INPUT and "validation set" in capsys.readouterr().err


def test_files_that_a_recipe_names_are_part_of_an_experiments_identity(tmp_path, saved_lora) -> None:
    (template := tmp_path / "chat.jinja").write_text("{{ messages }}")
    (texts := tmp_path / "general.jsonl").write_text('{"text": "a"}\n')
    options = [
        f"data.chat_template={template}",
        f"adapter.init_from={saved_lora}",
        f"eval.forgetting={texts}",
    ]
    recipe = loader.load(QUICKSTART, options)

    def identities() -> tuple[str, dict[str, str]]:
        return kept_runs.identity(recipe, []), kept_runs.named_files(recipe)

    before = identities()
    assert identities() == before and len(before[1]) == 4
    for path in (
        template,
        texts,
        saved_lora / "adapter_config.json",
        saved_lora / "adapter_model.safetensors",
    ):
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        assert identities()[0] != before[0] and identities()[1] != before[1]
        path.write_bytes(content)


def test_values_of_an_experiment_are_whole_and_paths_are_their_last_part() -> None:
    def values(*overrides: str) -> dict[str, str]:
        return varied_keys.values_of(loader.load(QUICKSTART, overrides))

    for one, other in (
        ("model.add_tokens=[<a>, </tool>]", "model.add_tokens=[</tool>]"),
        (
            "data.columns={prompt: q1, completion: a/b}",
            "data.columns={prompt: q2, completion: a/b}",
        ),
        ("data.name=[{name: x/a.jsonl, weight: 5}, y/b.jsonl]", "data.name=[x/a.jsonl, y/b.jsonl]"),
    ):
        assert values(one) != values(other)
    here, there = (f"data.name=[{{name: {at}/a.jsonl, weight: 5}}, {at}/b.jsonl]" for at in ("x", "/y/z"))
    assert values(here) == values(there)


@pytest.mark.parametrize("streaming", ["true", "false"])
@pytest.mark.parametrize("changed", ["train", "other", "test"])
def test_changed_data_of_any_trial_is_another_study(streaming: str, changed: str, tmp_path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "other", "test")}
    for number, path in enumerate(files.values()):
        lines = (DATA / "train.jsonl").read_text().splitlines(keepends=True)
        path.write_text("".join(lines[8 * number : 8 * number + 8]))
    (tmp_path / "space.yaml").write_text(f"space: {{data.name: {{choices: [{files['other']}]}}}}\n")
    given = [f"data.name={files['train']}", f"data.validation={files['test']}", "train.max_steps=2"]
    given += [f"data.streaming={streaming}", "train.effective_batch_size=4", f"data.cache_dir={tmp_path}/c"]

    def content() -> str:
        space = search_space.read(tmp_path / "space.yaml")
        return search_space_checks.look(str(QUICKSTART), given, space).content

    before = content()
    assert content() == before
    files[changed].write_text("".join(lines[24:32]))
    assert content() != before
