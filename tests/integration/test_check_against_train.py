"""`check` and `train` give one verdict, in the same words, on a good recipe with one change."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from finetune.cli import main
from finetune.core.errors import Problem, UserError
from finetune.preflight import checker, choice_checks
from finetune.recipe import loader
from finetune.training import pipeline
from support import small_tasks
from support.paths import DATA, QUICKSTART

EXAMPLES = 24


class FirstStepDone(BaseException):
    """The end of the first step: what comes then is no question of `check`."""


class StopAfterFirstStep(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise FirstStepDone


def verdict(ask: Callable[[], object]) -> tuple[int, set[str]]:
    """The exit code and the messages; 0: accepted."""
    try:
        ask()
    except FirstStepDone:
        pass
    except UserError as error:
        return int(error.code), set(map(words, error.problems))
    return 0, set()


def words(problem: Problem) -> str:
    """A message, whatever the order of names in a list: files and live models have others."""
    return " ".join(sorted(re.split(r"[\s,]+", str(problem))))


@pytest.fixture
def good(tmp_path: Path, two_layers: Path) -> list[str]:
    """Overrides of the quickstart that train in a second, and files that a change may name."""
    for name, count in (("train", EXAMPLES), ("test", 4)):
        lines = (DATA / f"{name}.jsonl").read_text().splitlines()[:count]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    small_tasks.one_of_each(tmp_path)
    (tmp_path / "no_text.jsonl").write_text('{"words": "none"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "no_answer.jsonl").write_text('{"messages": [{"role": "user", "content": "Who?"}]}\n' * 30)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    given = [
        f"model.name={two_layers}",
        f"data.name={tmp_path}/train.jsonl",
        f"data.validation={tmp_path}/test.jsonl",
    ]
    small = ["train.max_steps=2", "train.warmup_steps=0", "train.effective_batch_size=4"]
    return [
        *given,
        *small,
        "eval.forgetting=false",
        "eval.generate=false",
        f"train.output_dir={tmp_path}/run",
    ]


BAD = [
    # evaluation
    "eval.eval_steps=1 eval.tasks=[HERE/choice.yaml] eval.metric_for_best_model=choice/f1",
    "eval.eval_steps=1 eval.tasks=[HERE/exact.yaml] eval.metric_for_best_model=exact/acc",
    "eval.eval_steps=1 eval.tasks=[HERE/likely.yaml] eval.metric_for_best_model=likely/perplexity",
    "eval.eval_steps=1 eval.tasks=[HERE/choice.yaml] eval.metric_for_best_model=another/acc",
    "eval.tasks=[no_such_task]",
    "eval.tasks=[HERE/missing.yaml]",
    "eval.tasks=[HERE/train.jsonl.yaml]",
    "eval.tasks=[HERE/choice.yaml,HERE/../here/choice.yaml]",
    "eval.tasks=[HERE/choice.yaml] eval.engine=vllm",
    "eval.forgetting=HERE/missing.jsonl",
    "eval.forgetting=HERE/no_text.jsonl",
    "eval.forgetting=HERE/empty.jsonl",
    "eval.forgetting=HERE",
    # data
    "data.name=HERE/missing.jsonl",
    "data.name=HERE/empty.jsonl",
    "data.name=HERE/no_answer.jsonl",
    "data.name=HERE/no_text.jsonl",
    "data.name=HERE/train.jsonl data.validation=HERE/train.jsonl",
    "data.validation=HERE/missing.jsonl",
    "data.format=alpaca",
    "data.columns={instruction: nothing}",
    "data.chat_template=HERE/missing.jinja",
    "data.chat_template=no_such_template",
    "data.streaming=true train.max_steps=null",
    "data.name=HERE/nothing*.jsonl",
    "data.name=[HERE/train.jsonl,HERE/missing.jsonl]",
    "data.validation=HERE/empty.jsonl",
    "data.revision=main",
    # publishing
    "publish.repo=not-a-name/with/three",
    "publish.base_model=two,words",
    # number of examples against the batch size
    "train.effective_batch_size=32",
    "train.effective_batch_size=32 train.max_steps=null",
    "train.effective_batch_size=24 data.validation=null data.validation_fraction=0.2",
    "train.effective_batch_size=32 train.dataloader_drop_last=true",
    # model
    "model.name=HERE/missing",
    "model.name=HERE/used",
    "model.revision=main",
    "model.quantization=nf4 adapter.type=full",
    # adapter
    "adapter.target_modules=[q_prj]",
    "adapter.target_modules=[]",
    "adapter.modules_to_save=[nothing]",
    "adapter.exclude_modules=[nothing]",
    "adapter.layers_to_transform=[9]",
    "adapter.rank_pattern={nothing: 4}",
    "adapter.trainable_token_indices=[99999]",
    "adapter.target_parameters=[nothing.weight]",
    "adapter.init_from=HERE/missing",
    "adapter.init_from=HERE/used",
    "adapter.type=prompt_tuning adapter.init_from=HERE/used",
    "adapter.type=adalora adapter.tinit=1 adapter.tfinal=1",
    "adapter.type=adalora train.max_steps=1",
    "adapter.type=c3a adapter.block_size=7",
    "adapter.type=oft adapter.oft_block_size=7",
    "adapter.type=vblora adapter.vector_length=7",
    "adapter.type=adalora adapter.init_r=1 adapter.target_r=4",
    "adapter.layers_pattern=layers",
    "adapter.rank_pattern=null",
    "adapter.type=trainable_tokens adapter.token_indices=[]",
    "adapter.type=trainable_tokens adapter.token_indices=[5]",
    # training
    "train.learning_rate=0",
    "train.output_dir=HERE/used",
    "train.output_dir=HERE/train.jsonl",
    "train.output_dir=HERE/train.jsonl/run",
    "train.report_to=wandb",
    "train.report_to=no_such_tracker",
    "train.optim=galore_adamw train.optim_target_modules=all-linear",
    "train.optim=galore_adamw",
    "train.optim=lomo",
    "train.router_aux_loss_coef=0.1",
    "train.warmup_steps=1 train.max_steps=1",
    "train.lr_scheduler_type=cosine_with_min_lr",
    # speed
    "speed.qat={config: IntxWeightOnlyConfig, group_size: 48}",
]  # fmt: skip
assert len(BAD) >= 60


def recipe_of(change: str, good: list[str], here: Path) -> Any:
    """The good recipe with one change; `HERE` stands for the folder of its files."""
    changes = [part.replace("HERE", str(here)) for part in split(change)]
    keys = {override.partition("=")[0] for override in changes}
    kept = [override for override in good if override.partition("=")[0] not in keys]
    return loader.load(QUICKSTART, [*kept, *changes])


def split(change: str) -> list[str]:
    """At the spaces before a key, not those inside of a value."""
    parts: list[str] = []
    for word in change.split(" "):
        if "=" in word and "." in word.partition("=")[0]:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts


@pytest.mark.parametrize("change", BAD)
def test_check_and_train_refuse_a_bad_recipe_in_the_same_words(
    change: str, good: list[str], tmp_path: Path
) -> None:
    try:
        recipe = recipe_of(change, good, tmp_path)
    except UserError:
        return  # both read the recipe by the same function, and got no further
    code, said = verdict(lambda: checker.check(recipe))
    assert code, "check accepts it"

    def train() -> None:
        checker.check_without_examples(recipe)
        pipeline.run(recipe, verbosity="quiet", callbacks=[StopAfterFirstStep()])

    train_code, train_said = verdict(train)
    assert train_code == code
    # `check` reads all sources at once, and only the first examples of each: either may say more
    assert said & train_said, f"check: {said}, train: {train_said}"


def test_check_and_train_accept_the_good_recipe(good: list[str]) -> None:
    recipe = loader.load(QUICKSTART, good)
    assert verdict(lambda: checker.check(recipe)) == (0, set())
    assert verdict(lambda: pipeline.run(recipe, verbosity="quiet", callbacks=[StopAfterFirstStep()])) == (
        0,
        set(),
    )


@pytest.mark.parametrize("override", ["train.warmup_steps=5", "train.save_steps=9"])
def test_check_accepts_what_train_accepts(override: str, good: list[str], tmp_path: Path) -> None:
    recipe = recipe_of(override, good, tmp_path)
    assert verdict(lambda: checker.check(recipe))[0] == 0
    assert verdict(lambda: pipeline.run(recipe, verbosity="quiet", callbacks=[StopAfterFirstStep()]))[0] == 0


def test_check_notes_an_option_that_this_machine_cannot_train(good: list[str], tmp_path: Path) -> None:
    """The run may be meant for another machine."""
    recipe = recipe_of("model.attention=flex_attention", good, tmp_path)
    code, said = verdict(lambda: pipeline.run(recipe, verbosity="quiet"))
    if code:  # there is no GPU here
        assert any(
            "train would stop on this machine: model.attention" in note for note in checker.check(recipe)
        )
        assert said


def test_check_notes_what_the_launch_excludes(
    good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    recipe = recipe_of("model.quantization=torchao_int8", good, tmp_path)
    code, said = verdict(lambda: choice_checks.setup_of(recipe))
    assert code == 2 and said
    notes = [
        note for note in checker.check(recipe) if note.startswith("train would stop under this launch: ")
    ]
    assert any("model.quantization: FSDP" in note for note in notes)


def test_check_of_a_folder_with_a_run_is_a_note(good: list[str], tmp_path: Path) -> None:
    recipe = loader.load(QUICKSTART, good)
    assert verdict(lambda: pipeline.run(recipe, verbosity="quiet", callbacks=[StopAfterFirstStep()]))[0] == 0
    assert any("train.output_dir" in note and "is not empty" in note for note in checker.check(recipe))


@pytest.mark.parametrize(
    "overrides",
    [
        ["adapter.type=dora", "adapter.lora_dropout=0.05", "speed.compile=true"],
        ["speed.fused=false", "speed.activation_checkpointing=mlp"],
        ["speed.compile=true"],
    ],
    ids=" ".join,
)
def test_check_notes_what_train_refuses_of_a_models_speed(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What only the model and its adapter decide, by the function that decides for the run."""
    assert main.main(["check", str(QUICKSTART), *overrides]) == 0
    noted = "train would stop on this machine: speed." in capsys.readouterr().out
    recipe = loader.load(QUICKSTART, overrides)
    if noted:
        code, said = verdict(lambda: pipeline.run(recipe, verbosity="quiet"))
        assert code == 3 and said
    else:
        assert overrides == ["speed.compile=true"]
