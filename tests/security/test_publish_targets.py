"""A run folder of another person does not decide where it is published, who sees it, or what it stands on."""

import json
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.preflight import publish_target
from finetune.recipe.loader import load
from finetune.run_folder.run_folder import RunFolder
from support.hub_server import Hub
from support.paths import QUICKSTART

# huggingface_hub hands httpx its LFS parts as `data` (2.4, lfs.py, _upload_single_part)
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")


def with_section(folder: RunFolder, **publish: object) -> RunFolder:
    """The run with other values in `publish:` of its recipe."""
    head, _, section = folder.recipe.read_text().partition("\npublish:\n")
    lines = section.splitlines()
    for key, value in publish.items():
        lines = [f"  {key}: {json.dumps(value)}" if line.startswith(f"  {key}: ") else line for line in lines]
    folder.recipe.write_text("\n".join([head, "publish:", *lines, ""]))
    return folder


def publish(folder: RunFolder, *options: str) -> int:
    return main.main(["publish", str(folder.path), *options])


FOREIGN = [
    ({"repo": "evil/exfil"}, (), "--repo evil/exfil"),
    ({"repo": "evil/exfil", "private": False}, (), "--repo evil/exfil --public"),
    ({"repo": "evil/exfil", "private": False}, ("--repo", "me/own"), "--repo me/own --public"),
    ({"private": False}, ("--repo", "me/own"), "--repo me/own --public"),
    (
        {"repo": "evil/exfil", "revision": "v2"},
        ("--public",),
        "--repo evil/exfil --public publish.revision=v2",
    ),
]


@pytest.mark.parametrize(("section", "options", "asked"), FOREIGN)
def test_publish_to_a_target_of_the_run_folder_is_refused(
    section: dict[str, object], options: tuple[str, ...], asked: str, hub: Hub, trained, capsys
) -> None:
    folder = with_section(trained(), **section)
    hub.requests.clear()  # of training
    assert publish(folder, *options) == 2
    said = capsys.readouterr().err
    assert f"finetune publish {shlex.quote(str(folder.path))} {asked}" in said and "public" in said
    assert not hub.repos and not hub.requests, "nobody was asked, and nothing was made"


def test_publish_with_the_command_of_the_error_publishes(hub: Hub, trained, capsys) -> None:
    """From a laptop or from CI it is one command, without a prompt."""
    folder = with_section(trained(), repo="me/notes", private=False)
    assert publish(folder) == 2
    command = capsys.readouterr().err.partition("to publish to this one, run: finetune ")[2].splitlines()[0]
    assert main.main([*shlex.split(command), "--quiet"]) == 0
    assert not hub.repos["me/notes"].private and len(hub.repos["me/notes"].files) > 10


def test_dry_run_shows_the_target_of_the_run_folder(hub: Hub, trained, capsys) -> None:
    folder = with_section(trained(), repo="evil/exfil", private=False)
    hub.requests.clear()
    assert publish(folder, "--dry-run") == 0
    assert "files for evil/exfil (public)" in capsys.readouterr().out and not hub.requests


def test_train_by_the_recipe_of_a_run_folder_names_its_target(tmp_path: Path) -> None:
    text = QUICKSTART.read_text() + "\npublish:\n  repo: evil/exfil\n  private: false\n"
    (tmp_path / "own.yaml").write_text(text)
    (tmp_path / "recipe.resolved.yaml").write_text(text)
    (tmp_path / "link.yaml").symlink_to("recipe.resolved.yaml")
    assert not publish_target.check_recipe(load(tmp_path / "own.yaml")), "a recipe of one's own says where"
    for name in ("recipe.resolved.yaml", "link.yaml"):
        with pytest.raises(UserError, match="only the run folder says") as raised:
            publish_target.check_recipe(load(tmp_path / name))
        assert "evil/exfil (public)" in str(raised.value)
        for more in (["publish.repo=null"], ["publish.repo=me/own", "publish.private=true"]):
            assert not publish_target.check_recipe(load(tmp_path / name, more))


def test_check_and_train_refuse_the_target_alike(tmp_path: Path, capsys) -> None:
    (tmp_path / "recipe.resolved.yaml").write_text(QUICKSTART.read_text() + "\npublish: {repo: evil/exfil}\n")
    said = []
    for command in ("check", "train"):
        overrides = ["data.name=examples/tiny_llama/data/train.jsonl", "data.validation=null"]
        overrides += ["model.name=examples/tiny_llama/model", f"train.output_dir={tmp_path / 'run'}"]
        assert main.main([command, str(tmp_path / "recipe.resolved.yaml"), *overrides]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and "publish.repo" in said[0] and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"base_model_name_or_path": "evil/base"},
        {"base_model_name_or_path": "../../elsewhere/other"},
        {"revision": "0" * 40},
        {"base_model_name_or_path": None},
    ],
)
def test_command_on_an_adapter_of_another_base_is_refused(
    changed: dict[str, object], hub: Hub, trained, capsys
) -> None:
    folder = trained()
    hub.requests.clear()
    file = folder.adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    for command in (["publish", "--repo", "me/notes"], ["evaluate"], ["merge"], ["chat", "--prompt", "x"]):
        assert main.main([command[0], str(folder.path), *command[1:]]) == 2
        assert "the adapter and the recipe of the run name different base models" in capsys.readouterr().err
    assert not hub.repos and not hub.requests


def killed(work: Callable[[], object]) -> bool:
    """Whether a process of its own ended by SIGKILL while it did this."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def end_here(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("step", ["preupload_lfs_files", "create_commit"])
def test_publish_that_is_killed_leaves_an_empty_private_repository(
    step: str, hub: Hub, trained, monkeypatch
) -> None:
    folder = trained()
    with monkeypatch.context() as patched:
        patched.setattr(f"huggingface_hub.HfApi.{step}", end_here)
        assert killed(lambda: publish(folder, "--repo", "me/notes"))
    repo = hub.repos["me/notes"]
    assert (
        repo.private
        and repo.files.keys() == {".gitattributes"}
        and not (folder.path / "publish.json").exists()
    )
    assert publish(folder, "--repo", "me/notes", "--quiet") == 0
    assert len(repo.log) == 2 and len(repo.files) > 10, "all of it in one commit"


@pytest.mark.soak
@pytest.mark.parametrize("step", ["merged_files.write_merged", "publish"])
def test_merge_that_is_killed_leaves_no_weights(step: str, trained, monkeypatch) -> None:
    folder = trained()
    with monkeypatch.context() as patched:
        patched.setattr(f"finetune.export.merging.{step}", end_here)
        assert killed(lambda: main.main(["merge", str(folder.path), "--quiet"]))
    assert not (folder.path / "merged").exists() and not (folder.path / "merge.json").exists()
    assert main.main(["merge", str(folder.path), "--quiet"]) == 0
    assert (folder.path / "merged" / "model.safetensors").exists()
