"""The Python API raises `UserError` alone."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from finetune import api
from finetune.core.errors import Exit, UserError, only_user_errors
from finetune.export import targets
from finetune.recipe import loader
from support.paths import QUICKSTART


def test_only_user_errors_exception_of_a_library_keeps_its_cause() -> None:
    original = ValueError("from elsewhere")
    with (
        pytest.raises(UserError, match="while finetune trained the model") as caught,
        only_user_errors("trained the model"),
    ):
        raise original
    assert caught.value.__cause__ is original


def test_only_user_errors_full_disk_is_explained() -> None:
    with pytest.raises(UserError, match="the disk is full") as caught, only_user_errors("merged"):
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere")
    assert caught.value.code == Exit.ENVIRONMENT


def test_only_user_errors_full_disk_of_a_library_in_rust_is_explained(tmp_path: Path) -> None:
    """safetensors raises its own type, as in `finetune merge`. A limit on files stands for the full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(UserError, match="the disk is full") as caught, only_user_errors("merged"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            save_file({"a": torch.zeros(999)}, tmp_path / "model.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(caught.value.__cause__, SafetensorError)
    assert caught.value.code == Exit.ENVIRONMENT


def test_only_user_errors_own_errors_and_interrupts_pass() -> None:
    for error in (UserError("known"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, only_user_errors("checked"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize("name", ["check", "train", "plan"])
def test_api_function_exception_of_a_library_is_a_user_error(name: str, tmp_path: Path) -> None:
    """Bytes that are no text, where the config of a model is read."""
    recipe = loader.load(QUICKSTART, [f"model.name={tmp_path}"])
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError):
        getattr(api, name)(recipe)


@pytest.mark.parametrize("name", ["evaluate", "merge", "publish"])
def test_api_function_of_a_broken_run_is_a_user_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.resolved.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError):
        getattr(api, name)(tmp_path)


def test_export_model_with_an_unknown_target_names_every_target(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        api.export_model(tmp_path, "onnx")
    said = str(caught.value.problems[0])
    assert [to for to in targets.MODULES if to not in said] == []
