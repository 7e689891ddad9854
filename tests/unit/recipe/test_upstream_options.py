"""What is read from the libraries' source is what the libraries really have."""

import dataclasses

import pytest

from finetune.recipe import build, renames, schema, upstream_options


def test_fields_are_those_of_the_imported_classes() -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from trl.trainer.sft_config import SFTConfig

    classes = {str(name.value).lower(): config for name, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    read = upstream_options.peft_types()
    assert classes.keys() <= read.keys()
    of_every_peft_config = {"task_type", "peft_type", "auto_mapping", "peft_version"}
    of_every_peft_config |= {"base_model_name_or_path", "revision", "inference_mode"}
    for sources, imported in (
        (upstream_options.SFT_CONFIG, SFTConfig),
        *((upstream_options.peft_config(read[name]), imported) for name, imported in classes.items()),
    ):
        real = {field.name for field in dataclasses.fields(imported) if field.init}
        found = set(upstream_options.fields(sources))
        assert real - found <= of_every_peft_config, imported
        assert found - {f.name for f in dataclasses.fields(imported)} == set(), imported


def test_every_field_of_sft_config_is_ours_passed_on_or_owned() -> None:
    passed_on = set(build.sections()["train"].model_fields)
    for name in upstream_options.fields(upstream_options.SFT_CONFIG):
        assert (name in passed_on) != bool(renames.owner_of(name)) or name in schema.Train.model_fields, name


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("SchedulerType | str", "cosine", "cosinee"),
        ("int | None", None, "3"),
        ("Optional[Union[list[str], str]]", ["a"], 3),
        ("Literal['none', 'all']", "all", "some"),
        ("bool | Literal['gaussian', 'pissa_niter_[number of iters]']", "pissa_niter_16", 3),
        ("float", 1, "1"),
        ("dict[str, Any] | str | None", {"a": 1}, 2),
    ],
)
def test_annotations_become_checkable_types(annotation: str, good: object, bad: object) -> None:
    import ast

    from pydantic import ConfigDict, TypeAdapter, ValidationError

    parsed = upstream_options._type(ast.parse(annotation, mode="eval").body, upstream_options._enums())
    adapter = TypeAdapter(parsed, config=ConfigDict(strict=True))
    assert adapter.validate_python(good) == good
    with pytest.raises(ValidationError):
        adapter.validate_python(bad)
