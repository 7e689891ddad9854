"""A run that is stopped and resumed is the run itself: every adapter, every way to feed it, every step."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.checkpointing import checkpoints, resume, resume_contract, serialization, training_state
from finetune.cli import main
from finetune.core.errors import UserError
from finetune.experiments.runner import verify_resume
from finetune.run_folder.run_folder import RunFolder
from support.paths import DATA, ROOT
from support.runs import metrics, run_checks
from support.soak import soak_except

STEPS = 12
COMMON = [
    f"train.max_steps={STEPS}",
    "train.warmup_steps=3",
    "train.lr_scheduler_type=cosine",
    "train.effective_batch_size=4",
    "train.per_device_train_batch_size=2",
    "train.learning_rate=5e-3",
    "train.save_steps=7",
    "train.save_total_limit=null",
]
LORA = ["adapter.type=lora", "adapter.r=4", "adapter.lora_dropout=0.1"]
KINDS = {
    "lora": [*LORA, "train.save_steps=1"],
    "dora": ["adapter.type=dora", "adapter.r=4", "adapter.lora_dropout=0.1"],
    "adalora": ["adapter.type=adalora", "adapter.r=4", "adapter.tinit=2", "adapter.tfinal=3"],
    "ia3": ["adapter.type=ia3", "train.optim=adamw_8bit"],
    "qlora": ["adapter.type=qlora", "adapter.r=4", "adapter.lora_dropout=0.1"],
    "full": ["adapter.type=full", "train.learning_rate=1e-3", "train.optim=adafactor"],
    "packed": [*LORA, "data.packing=true", "data.max_length=192"],
    "padding_free": [*LORA, "data.padding_free=true", "train.train_sampling_strategy=group_by_length"],
    "streaming": [*LORA, "data.streaming=true", "data.shuffle_buffer=20", "data.packing=true"],
    "mixed": [*LORA, "adapter.loraplus_lr_ratio=8"],
    "validated": ["adapter.type=lora", "eval.eval_steps=2", "train.logging_steps=5"],
}
STRAIGHT: dict[str, Path] = {}


@pytest.fixture
def straight(train, tmp_path_factory) -> Callable[[str], RunFolder]:
    """`straight(kind)`: a run that was never stopped, with a checkpoint of each step, made once for all."""

    def run(kind: str) -> RunFolder:
        if kind not in STRAIGHT:
            folder = tmp_path_factory.mktemp("straight") / kind
            train(*options(kind), f"train.output_dir={folder}", f"--until={STEPS}", code=75)
            STRAIGHT[kind] = folder
        return RunFolder(STRAIGHT[kind])

    return run


def options(kind: str) -> list[str]:
    """18 rows: epochs end in half a batch, after steps 5 and 10."""
    given = {text.partition("=")[0] for text in KINDS[kind]}
    found = [text for text in COMMON if text.partition("=")[0] not in given] + KINDS[kind]
    rows, folder = (DATA / "train.jsonl").read_text().splitlines(), Path(os.environ["FINETUNE_CACHE"])
    count = 40 if kind in ("packed", "streaming") else 18
    for name, part in (("a", rows[:count]), ("b", rows[40:50])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    mixed = f"[{{name: {folder}/a.jsonl, weight: 0.5}}, {folder}/b.jsonl]"
    return [*found, f"data.name={mixed if kind == 'mixed' else folder / 'a.jsonl'}"]


@pytest.fixture
def stopped_after(straight, tmp_path) -> Callable[..., list[str]]:
    """`stopped_after(kind, step)`: that run's folder as it was when it was stopped; the options to go on."""

    def make(kind: str, step: int, name: str = "") -> list[str]:
        source, folder = straight(kind).path, tmp_path / (name or f"{kind}-{step}")
        shutil.copytree(source / "checkpoints" / f"step-{step}", folder / "checkpoints" / f"step-{step}")
        shutil.copy(source / "metrics.jsonl", folder)
        return [*options(kind), f"train.output_dir={folder}", "--resume"]

    return make


def differing(one: Path, other: Path, step: int) -> dict[str, list[str]]:
    parts = verify_resume.compare(one, other, step)
    assert {part.name for part in parts} >= training_state.PARTS.keys()
    return {part.name: part.differing[:3] for part in parts if part.differing}


@pytest.mark.parametrize("kind", soak_except(["lora", "adalora", "full", "packed", "validated"], KINDS))
def test_every_kind_goes_on_bit_for_bit(
    kind: str, straight, stopped_after, train, tmp_path, monkeypatch
) -> None:
    """From the middle to the end; AdaLoRA while it prunes. What goes on saves from the live tensors."""
    begin = 7  # within the second epoch
    straight(kind)
    # no memory for a copy, where `save` asks; enough to read a checkpoint
    monkeypatch.setattr(training_state, "available", lambda *groups: 2**50 if groups else 0)
    train(*stopped_after(kind, begin), f"--until={STEPS}", code=75)
    assert not differing(straight(kind).path, tmp_path / f"{kind}-{begin}", STEPS)


@pytest.mark.parametrize("step", soak_except([1, 6, STEPS - 1], range(1, STEPS)))
def test_after_every_step(step: int, straight, stopped_after, train, tmp_path) -> None:
    """One step further; so, by induction, to the end."""
    train(*stopped_after("lora", step), f"--until={step + 1}", code=75)
    cut = tmp_path / "cut"
    shutil.copytree(
        straight("lora").path / "checkpoints" / f"step-{step + 1}", cut / "checkpoints" / f"step-{step + 1}"
    )
    shutil.copy(straight("lora").path / "metrics.jsonl", cut)
    resume.rewind(RunFolder(cut), step + 1)
    assert not differing(cut, tmp_path / f"lora-{step}", step + 1)


def nothing(trainer: Any, kept: Any) -> None:
    """In place of what puts a part back."""


@pytest.mark.parametrize(
    ("kind", "step", "part"),
    [
        ("lora", 3, "weights"),
        ("lora", 3, "optimizer"),
        ("lora", 3, "scheduler"),
        ("lora", 3, "rng"),
        ("lora", 3, "batches"),
        ("adalora", 7, "allocation"),
        pytest.param("padding_free", 7, "epoch_rng", marks=pytest.mark.soak),
        ("validated", 7, "log"),
        ("validated", 7, "callbacks"),
    ],
)
def test_the_proof_sees_each_part_that_is_lost(
    kind: str, step: int, part: str, straight, stopped_after, train, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(training_state.PARTS, part, (training_state.PARTS[part][0], nothing))
    end = STEPS if step == 7 else step + 1
    train(*stopped_after(kind, step), f"--until={end}", code=75)
    assert differing_at(straight(kind).path, tmp_path / f"{kind}-{step}", end)


def test_the_proof_sees_a_lost_place_in_the_data(
    straight, stopped_after, train, tmp_path, monkeypatch
) -> None:
    from finetune.training.trainer import Trainer

    original = Trainer._init_training_state
    monkeypatch.setattr(Trainer, "_init_training_state", lambda *a, **k: (original(*a, **k)[0], 0))
    train(*stopped_after("mixed", 7), f"--until={STEPS}", code=75)
    assert "batches" in differing(straight("mixed").path, tmp_path / "mixed-7", STEPS)


def test_a_loader_draws_nothing_from_the_generator_of_training(monkeypatch) -> None:
    """Nor does one whose workers persist then draw once more in each life of a run."""
    import torch
    from trl.trainer.sft_trainer import SFTTrainer

    from finetune.training.trainer import Trainer

    made: Any = torch.utils.data.DataLoader([1, 2])  # pyright: ignore[reportArgumentType]  (a list is one)
    monkeypatch.setattr(SFTTrainer, "get_train_dataloader", lambda self: made)
    loader, before = Trainer.get_train_dataloader(object.__new__(Trainer)), torch.get_rng_state()
    assert len(list(loader)) == 2 and torch.equal(torch.get_rng_state(), before)


def test_fp16_s_scaler_is_kept() -> None:
    """The CPU trains without one; a part that is lost differs all the same."""
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(scaler=scaler))
    kept = training_state.PARTS["scaler"][0](trainer)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    training_state.PARTS["scaler"][1](
        trainer, serialization.restore(serialization.flatten(kept, {}, "s", torch.clone), {})
    )
    assert trainer.accelerator.scaler.state_dict() == kept


def offloaded(weights: Any) -> Any:
    """torchao's optimizer as it is made on a GPU, and there alone: one of torch's for each tensor."""
    import torch
    from torchao.optim import CPUOffloadOptimizer

    made: Any = object.__new__(CPUOffloadOptimizer)
    made.d_opt, made.d_param_groups = None, []
    made.optim_dict = {p: torch.optim.AdamW([p], lr=1e-2, fused=True) for p in weights}
    return made


def test_an_offloaded_optimizer_goes_on_as_it_was() -> None:
    import torch

    weights = [torch.nn.Parameter(torch.randn(size)) for size in (3, 5)]
    gradients = [[torch.randn(p.shape) for p in weights] for _ in range(4)]

    def step(trainer: Any, found: list[Any]) -> None:
        for (parameter, one), gradient in zip(trainer.optimizer.optim_dict.items(), found, strict=True):
            parameter.grad = gradient
            one.step()

    trainer: Any = SimpleNamespace(optimizer=offloaded(weights))
    for found in gradients[:2]:
        step(trainer, found)
    tensors: dict[str, torch.Tensor] = {}
    kept = serialization.flatten(
        training_state.PARTS["optimizer"][0](trainer), tensors, "optimizer", torch.clone
    )
    copies = [torch.nn.Parameter(p.detach().clone()) for p in weights]
    again: Any = SimpleNamespace(optimizer=offloaded(copies))
    again.resumed = {"path": Path("step-2"), "optimizer": serialization.restore(kept, tensors)}
    training_state.put_back(again, "optimizer")
    assert "optimizer" not in again.resumed, "held once, not until training ends"
    for found in gradients[2:]:
        step(trainer, found)
        step(again, found)
    assert all(map(torch.equal, weights, copies))
    inner = [one.optim_dict.values() for one in (trainer.optimizer, again.optimizer)]
    for before, after in zip(*inner, strict=True):
        (was,), (now,) = before.state.values(), after.state.values()
        assert {n: (t.dtype, t.device) for n, t in was.items()} == {
            n: (t.dtype, t.device) for n, t in now.items()
        }


def test_a_checkpoint_without_a_part_is_refused(stopped_after, train, tmp_path, capsys) -> None:
    given = stopped_after("lora", 3)
    path = tmp_path / "lora-3" / "checkpoints" / "step-3"
    content = {
        name: checkpoints.read_json(path, name)
        for name in ("state.json", "contract.json", "trainer_state.json")
    }
    del content["state.json"]["scheduler"]
    checkpoints.write(path.parent, 3, content, None)
    train(*given, code=4)
    assert "scheduler" in capsys.readouterr().err


def test_a_finished_run_is_what_it_would_have_been(straight, stopped_after, train, tmp_path, capsys) -> None:
    """Resumed from the middle and from the last step: the same best weights, scores and counts."""
    whole = train(*options("validated"), "train.save_strategy=no", name="whole")
    for step in (7, STEPS):
        train(*stopped_after("validated", step), code=0)
        run = RunFolder(tmp_path / f"validated-{step}")
        assert (run.adapter / "adapter_model.safetensors").read_bytes() == (
            whole.adapter / "adapter_model.safetensors"
        ).read_bytes()
        assert run.read("eval.json")["tuned"] == whole.read("eval.json")["tuned"]
        assert run_checks(run)["eval.eval_steps"] == run_checks(whole)["eval.eval_steps"]
    names = {path.name for path in run.path.rglob("*") if path.is_file()}
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    for resumes in ("--resume", "--resume=auto"):  # again: it is finished
        train(*stopped_options("validated", run), resumes)
    assert before == {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    train(*stopped_options("validated", run), "--resume", "train.learning_rate=1e-3", code=4)
    assert "train.learning_rate" in capsys.readouterr().err


def stopped_options(kind: str, run: RunFolder) -> list[str]:
    return [*options(kind), f"train.output_dir={run.path}"]


def test_what_differs_must_match_or_is_named(straight, stopped_after, train, tmp_path, capsys) -> None:
    given = stopped_after("lora", 3)
    other = tmp_path / "other.jsonl"
    other.write_text("".join((DATA / "train.jsonl").read_text().splitlines(keepends=True)[50:68]))
    train(*given, f"data.name={other}", "adapter.r=8", "train.seed=1", "train.learning_rate=1e-3", code=4)
    said = capsys.readouterr().err.partition("error:")[2]  # not what the first run has said
    for key in ("adapter.r ", "data: content", "train.seed", "train.learning_rate"):
        assert key in said, said
    assert "train.logging_steps" not in said and '"train.output_dir' not in said
    train(*given, "--until=4", "train.logging_steps=2", code=75)
    log = (tmp_path / "lora-3" / "log.txt").read_text()
    assert "train.logging_steps" in log and "now 2" in log and "resuming after step 3" in log
    resolved = tmp_path / "lora-3" / "recipe.resolved.yaml"
    assert main.main(["train", str(resolved), "--resume", "--until=5", "--quiet"]) == 75  # what `auto` became


MUST = {
    "adapter.": "type r lora_alpha target_modules",
    "data.": "columns format max_length packing padding_free reasoning role_map shuffle_buffer split "
    "streaming too_long train_on",
    "model.": "add_tokens attention quantization",
    "speed.": "activation_checkpointing compile fused loss",
    "train.": "effective_batch_size learning_rate lr_scheduler_type max_steps seed warmup_steps",
    "": "precision device processes steps rows accumulation tokenizer",
}
MAY = {
    "data.": "expect name validation",
    "eval.": "forgetting samples tasks",
    "model.": "name",
    "speed.": "offload",
    "train.": "logging_steps save_strategy skip_nonfinite",
    "versions.": "torch python",
}


def test_no_difference_is_silent(straight) -> None:
    """Every key of a recipe and every fact, changed alone: refused by name, or named; and which is which."""
    kept = checkpoints.read_json(straight("lora").path / "checkpoints" / "step-3", checkpoints.CONTRACT)
    kept["chosen"] = {}
    refused, named = set[str](), set[str]()
    for part in ("recipe", "facts"):
        for key, value in kept[part].items():
            for other in (f"not {value}", None):  # another value; a key that is there in one of them alone
                now = {**kept, part: {**kept[part], key: other}}
                try:
                    (said,) = resume_contract.compare(kept, now, Path("step-3"))
                    named.add(key)
                except UserError as error:
                    said = str(error)
                    assert error.code == 4
                    refused.add(key)
                assert key in said
    must, may = ({f"{s}{key}" for s, keys in part.items() for key in keys.split()} for part in (MUST, MAY))
    must |= {"chat template", "data: content", "base model weights"}
    assert must <= refused and may <= named and not refused & named
    assert len(refused | named) > 60


def test_a_kept_checkpoint_of_format_1_goes_on(train, two_layers, tmp_path) -> None:
    """Made when format 1 was the only one (AdaLoRA, while it prunes): later formats still read it."""
    kept, folder = ROOT / "tests" / "golden" / "format-1", tmp_path / "kept"
    shutil.copytree(kept / "step-2", folder / "checkpoints" / "step-2")
    given = ["adapter.type=adalora", "adapter.r=2", "adapter.target_modules=[q_proj]", "adapter.tinit=1"]
    given += ["adapter.lora_dropout=0.1", "adapter.tfinal=1", "train.max_steps=4", "train.warmup_steps=1"]
    given += ["train.effective_batch_size=4", "train.per_device_train_batch_size=2", "data.validation=null"]
    given += ["train.learning_rate=5e-3", "data.max_length=128", f"data.name={kept}/rows.jsonl"]
    given += ["eval.samples=0", "train.save_strategy=no", f"train.output_dir={folder}"]
    train(*given, "--resume", "--until=4", code=75)
    losses = [line["loss"] for line in metrics(RunFolder(folder))]
    assert losses == pytest.approx([5.509415149688721, 5.386411666870117], abs=1e-5), "of steps 3 and 4"


def test_another_base_is_refused_before_anything_is_changed(
    straight, stopped_after, train, two_layers, tmp_path, capsys
) -> None:
    other = Path(shutil.copytree(two_layers, tmp_path / "other"))
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1000] ^= 4
    (other / "model.safetensors").write_bytes(weights)
    given, folder = stopped_after("lora", 3), tmp_path / "lora-3"
    shutil.copytree(
        straight("lora").path / "checkpoints" / "step-4", folder / "checkpoints" / "step-4"
    )  # later
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    train(*given[:-1], "--resume=step-3", f"model.name={other}", code=4)
    assert "the base model differs from that of the checkpoint" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_resume_with_another_config_of_the_base_is_refused(
    stopped_after, train, two_layers, tmp_path, capsys
) -> None:
    """The weights are equal, but the model computes something else."""
    given, other = stopped_after("lora", 3), Path(shutil.copytree(two_layers, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    changes = {"rms_norm_eps": 1e-3, "hidden_act": "gelu", "attention_dropout": 0.5}
    for key, value in changes.items():
        (other / "config.json").write_text(json.dumps({**config, key: value}))
        train(*given, f"model.name={other}", "--dry-run", code=4)
        assert f"config.json: {key}" in capsys.readouterr().err
    (other / "config.json").write_text(
        json.dumps({**config, "transformers_version": "6", "use_cache": False})
    )
    train(*given, f"model.name={other}", "--dry-run")


def test_a_base_that_was_decomposed_is_not_said_to_be_another_model() -> None:
    with pytest.raises(UserError, match="OMP_NUM_THREADS"):
        resume_contract.check_base({"base": "a", "recipe": {}}, "b", Path("step-3"), decomposed=True)


def test_memory_is_the_container_s(tmp_path) -> None:
    free = training_state.available(tmp_path)
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(training_state.available(tmp_path) - free) < free / 2
    (tmp_path / "memory.max").write_text("5000\n")
    assert training_state.available(tmp_path) == 4000


def test_a_checkpoint_that_memory_has_no_room_for(straight, tmp_path, monkeypatch) -> None:
    """Every process of a machine reads it whole."""
    kept = straight("lora").path / "checkpoints" / "step-3"
    (tmp_path / "memory.current").write_text("0\n")
    (tmp_path / "memory.max").write_text(str(2 * checkpoints.size_of(kept)))
    assert training_state.read(kept, tmp_path)["weights"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match="too little memory to read the checkpoint") as raised:
        training_state.read(kept, tmp_path)
    assert raised.value.code == 3 and "4 processes x" in str(raised.value)


def test_a_run_says_what_its_checkpoints_cost(train) -> None:
    check = run_checks(train("train.save_steps=1"))["checkpoints"]
    made = re.fullmatch(r"2 written; training paused for at most (\d+\.\d\d) s", check["actual"])
    assert check["passed"] and made and float(made[1]) < 5


def test_damage_is_seen_and_passed_over(straight, stopped_after, train, tmp_path, capsys) -> None:
    """Every file, cut short, changed in one byte, or gone."""
    folder = tmp_path / "damaged" / "checkpoints"
    for step in (3, 4):
        shutil.copytree(straight("lora").path / "checkpoints" / f"step-{step}", folder / f"step-{step}")
    names = sorted(path.name for path in (folder / "step-4").iterdir())
    assert len(names) >= 6
    for name in names:
        path = folder / "step-4" / name
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for damaged in (flipped, whole[:-1], None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            found = checkpoints.newest(folder)
            assert found and found.step == 3 and name in found.notes[0]
            with pytest.raises(UserError) as raised:
                checkpoints.named(folder, "step-4")
            assert raised.value.code == 4
            path.write_bytes(whole)
    print(f"\ndamages: {len(names)} files x 3")  # benchmarks/reliability.py --saves
    found = checkpoints.newest(folder)
    assert found and found.step == 4
    (folder / "step-4" / "weights.safetensors").write_bytes(b"")
    shutil.copy(straight("lora").path / "metrics.jsonl", folder.parent)
    where = f"train.output_dir={folder.parent}"
    train(*options("lora"), where, "--resume=step-4", code=4)
    train(*options("lora"), where, "--resume", "--until=4", code=75)
    assert "weights.safetensors has 0 bytes" in (folder.parent / "log.txt").read_text()
    assert not differing_at(straight("lora").path, folder.parent, 4)
    for step in (3, 4):
        (folder / f"step-{step}" / "manifest.json").write_text("{}")
    train(*options("lora"), where, "--resume", code=4)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "trainer_state.json"])
def test_checkpoint_that_is_replaced_after_it_was_verified_is_an_error(
    name: str, straight, stopped_after, train, tmp_path, monkeypatch, capsys
) -> None:
    given, folder = stopped_after("lora", 3), tmp_path / "lora-3"
    read, path = training_state.read, folder / "checkpoints" / "step-3" / name

    def replaced(*of: Any) -> Any:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        return read(*of)

    monkeypatch.setattr(training_state, "read", replaced)
    train(*given, code=4)
    said = capsys.readouterr().err
    assert "the checkpoint changed while finetune read it" in said and name in said


def differing_at(one: Path, other: Path, step: int) -> dict[str, list[str]]:
    """But for what was logged later."""
    found = differing(one, other, step)
    found.pop("metrics.jsonl", None)
    return found


def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_found(straight, tmp_path) -> None:
    """At 40 places of each file, its first and last byte among them; the contract of the run too."""
    folder = tmp_path / "flipped" / "checkpoints"
    shutil.copytree(straight("lora").path / "checkpoints" / "step-3", folder / "step-3")
    checkpoints.write_contract(folder, checkpoints.read_contract(folder / "step-3"))
    assert checkpoints.named(folder, "step-3").contract == checkpoints.read_contract(folder)
    names = sorted(path.name for path in (folder / "step-3").iterdir())
    assert len(names) >= 7
    chance = random.Random(0)
    for name in [*(f"step-3/{name}" for name in names), checkpoints.CONTRACT]:
        whole = (folder / name).read_bytes()
        places = {0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(40))}
        for place in sorted(places):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << chance.randrange(8)
            (folder / name).write_bytes(flipped)
            with pytest.raises(UserError) as raised:
                checkpoints.read_contract(checkpoints.named(folder, "step-3").path.parent)
            assert raised.value.code == 4, (name, place)
        (folder / name).write_bytes(whole)


def test_resume_with_a_damaged_contract_of_the_run_names_the_command_that_repairs_it(
    straight, stopped_after, train, tmp_path, capsys
) -> None:
    given = stopped_after("lora", 3)
    folder = tmp_path / "lora-3" / "checkpoints"
    checkpoints.write_contract(folder, checkpoints.read_contract(folder / "step-3"))
    path = folder / checkpoints.CONTRACT
    path.write_bytes(path.read_bytes().replace(b'"recipe"', b'"recipf"'))
    train(*given, "--until=4", code=4)
    said = capsys.readouterr().err
    shown = re.search(r"help: +(cp .*)", said)
    assert shown, said
    assert os.system(shown[1]) == 0
    train(*given, "--until=4", code=75)
