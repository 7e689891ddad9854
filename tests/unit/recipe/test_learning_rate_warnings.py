"""A learning rate that was set for another adapter type, or is far from the usual ones, gets a warning."""

import pytest

from finetune.cli import main
from finetune.recipe import adapter_types, loader
from support.paths import QUICKSTART

USUAL = {name: kind.learning_rate for name, kind in adapter_types.all_types().items() if not kind.refused}


def advice_of(*overrides: str) -> list[str]:
    return adapter_types.advice(loader.load(QUICKSTART, list(overrides)))


@pytest.mark.parametrize("name", [name for name, rates in USUAL.items() if rates])
def test_swapped_type_with_other_usual_rates_warns_with_its_range(name: str) -> None:
    """The quickstart is a LoRA with learning_rate 4e-3."""
    low, high = USUAL[name] or (0, 0)
    warned = [line for line in advice_of(f"adapter.type={name}") if line.startswith("warning: ")]
    far = name in ("ia3", "full", "prompt_tuning", "p_tuning", "prefix_tuning", "cartridge")
    assert bool(warned) == far, warned
    assert all(f"for lora, and the usual range of {name} is {low:g} to {high:g}." in line for line in warned)
    for rate in (low, high):
        assert not [
            line
            for line in advice_of(f"adapter.type={name}", f"train.learning_rate={rate}")
            if "rate" in line
        ]


@pytest.mark.parametrize(
    ("rate", "label"), [("9e-8", "warning: "), ("5e-7", "train.learning_rate: "), ("2e-2", "warning: ")]
)
def test_rate_outside_the_usual_range_warns_from_ten_times_on(rate: str, label: str) -> None:
    (said,) = advice_of("adapter.type=full", f"train.learning_rate={rate}")
    assert said.startswith(label) and "the usual range of full is 1e-06 to 0.001" in said


def test_suggested_rate_of_a_warning_gives_no_warning() -> None:
    (said,) = advice_of("adapter.type=ia3")
    suggested = said.rpartition("Try ")[2]
    assert not advice_of("adapter.type=ia3", suggested)


def test_type_that_the_file_names_itself_gives_no_warning(tmp_path) -> None:
    text = QUICKSTART.read_text().replace("type: lora", "type: ia3")
    (tmp_path / "ia3.yaml").write_text(text)
    assert not adapter_types.advice(loader.load(tmp_path / "ia3.yaml"))
    assert not adapter_types.advice(loader.load(tmp_path / "ia3.yaml", ["adapter.type=ia3"]))


@pytest.mark.parametrize("command", ["check", "plan", "train"])
def test_commands_print_the_warning_once(command: str, small, capsys) -> None:
    options = [*small, "adapter.type=ia3", *(["--dry-run"] if command == "train" else [])]
    assert main.main([command, str(QUICKSTART), *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        printed.count(
            "warning: train.learning_rate: the recipe sets 0.004 for lora, and the usual range of ia3 is"
        )
        == 1
    )
