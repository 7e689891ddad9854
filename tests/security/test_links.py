"""Nothing that finetune writes below a stranger's folder leaves it: links, hard links, FIFOs, races."""

import contextlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.core import safe_files
from finetune.core.errors import UserError
from finetune.run_folder import run_folder
from support.paths import MODEL, QUICKSTART


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A stranger's folder, and a folder with a file that must stay as it is."""
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim").write_text("as it was")
    return tmp_path / "run", tmp_path / "outside"


WRITERS: dict[str, Callable[[Path, str], object]] = {
    "write_text": lambda root, name: safe_files.write_text(root, name, "overwritten"),
    "open_append": lambda root, name: safe_files.open_append(root, name).close(),
    "read_bytes": safe_files.read_bytes,
    "make_folder": lambda root, name: safe_files.make_folder(root, f"{name}/new"),
    "rename": lambda root, name: safe_files.rename(root, name, "elsewhere"),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["victim", "folder/victim", "deep/folder/victim"])
def test_safe_files_with_a_link_in_the_path_refuse(places: tuple[Path, Path], writer: str, name: str) -> None:
    run, outside = places
    (run / "victim").symlink_to(outside / "victim")
    (run / "folder").symlink_to(outside)
    (run / "deep").mkdir()
    (run / "deep" / "folder").symlink_to(outside, target_is_directory=True)
    with pytest.raises(UserError, match="follows no link"):
        WRITERS[writer](run, name)
    assert (outside / "victim").read_text() == "as it was"
    assert [entry.name for entry in outside.iterdir()] == ["victim"]


def test_open_append_of_a_hard_link_leaves_the_other_name_alone(places: tuple[Path, Path]) -> None:
    run, outside = places
    os.link(outside / "victim", run / "log.txt")
    with safe_files.open_append(run, "log.txt") as log:
        log.write(", and more")
    assert (run / "log.txt").read_text() == "as it was, and more"
    assert (outside / "victim").read_text() == "as it was"


def test_only_the_folder_of_wandb_may_hold_links_out_of_a_run(places: tuple[Path, Path]) -> None:
    """wandb 0.31 links its log to its cache. finetune opens nothing there."""
    run, outside = places
    (logs := run / "wandb" / "offline-run-1" / "logs").mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(outside / "victim")
    run_folder.refuse_links(run)
    for name in ("wandb/../other.log", "checkpoints/wandb"):
        (link := run / name).parent.mkdir(exist_ok=True)
        link.symlink_to(outside)
        with pytest.raises(UserError, match="leads out of its folder"):
            run_folder.refuse_links(run)
        link.unlink()
    shutil.rmtree(run / "wandb")
    (run / "wandb").symlink_to(outside)
    with pytest.raises(UserError, match="leads out of its folder"):
        run_folder.refuse_links(run)


def test_a_device_is_not_replaced(places: tuple[Path, Path]) -> None:
    """A report written to /dev/null would replace the device for the whole machine."""
    run, _ = places
    try:
        os.mknod(run / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root can make a device")
    (run / "file").write_text("as it was")
    writers = [
        lambda: safe_files.write_text(run, "null", "overwritten"),
        lambda: safe_files.open_new(run, "null"),
        lambda: safe_files.rename(run, "file", "null"),
        lambda: safe_files.remove(run, "null"),
    ]
    for writer in writers:
        with pytest.raises(UserError, match="does not write to a device"):
            writer()
    assert (run / "null").is_char_device() and (run / "file").read_text() == "as it was"


def test_safe_files_with_a_fifo_refuse_at_once(places: tuple[Path, Path]) -> None:
    run, _ = places
    os.mkfifo(run / "eval.json")
    with pytest.raises(UserError, match="opens only regular files"):
        safe_files.read_bytes(run, "eval.json")
    with pytest.raises(UserError, match="opens only regular files"):
        safe_files.open_append(run, "eval.json")


@pytest.mark.parametrize("name", ["../outside/victim", "/etc/passwd", "a/../../outside/victim", "", "a\0b"])
def test_safe_files_with_a_name_that_leaves_the_folder_refuse(places: tuple[Path, Path], name: str) -> None:
    with pytest.raises(UserError, match="leads out of its folder"):
        safe_files.write_text(places[0], name, "overwritten")


def test_remove_deletes_links_and_not_what_they_lead_to(places: tuple[Path, Path]) -> None:
    run, outside = places
    (run / "old").mkdir()
    (run / "old" / "link").symlink_to(outside, target_is_directory=True)
    (run / "link").symlink_to(outside, target_is_directory=True)
    safe_files.remove(run, "old")
    safe_files.remove(run, "link")
    assert list(run.iterdir()) == []
    assert (outside / "victim").exists()


def test_private_folder_that_fails_leaves_nothing(places: tuple[Path, Path]) -> None:
    run, _ = places
    with pytest.raises(ZeroDivisionError), safe_files.private_folder(run, "model") as private:
        (private.path / "part").write_text("half")
        raise ZeroDivisionError
    assert list(run.iterdir()) == []


def test_writers_stay_inside_while_a_folder_is_swapped_for_a_link(places: tuple[Path, Path]) -> None:
    run, outside = places
    (run / "folder").mkdir()
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):  # make_folder may make a folder where none is
                os.rename(run / "folder", run / "hidden")
                os.symlink(outside, run / "folder")
            with contextlib.suppress(OSError):
                os.unlink(run / "folder")
            shutil.rmtree(run / "hidden", ignore_errors=True)
            (run / "folder").mkdir(exist_ok=True)
            time.sleep(0.001)

    thread = threading.Thread(target=swap)
    thread.start()

    def save() -> None:
        with safe_files.replace_folder(run, "folder/saved") as private:
            (private / "victim").write_text("saved")

    writers = [save, *(partial(writer, run, "folder/victim") for writer in WRITERS.values())]
    writers.append(partial(safe_files.remove, run, "folder/victim"))
    written = refused = 0
    end = time.monotonic() + 10
    try:
        while (written < 200 or refused < 200) and time.monotonic() < end:
            for write in writers:
                try:
                    write()
                    written += 1
                except (UserError, OSError):
                    refused += 1
    finally:
        done.set()
        thread.join()
    assert written and refused, "the race was not met, or met every time"
    assert (outside / "victim").read_text() == "as it was"
    assert [entry.name for entry in outside.iterdir()] == ["victim"]


@pytest.mark.parametrize("name", ["report.html", ".eval.json.tmp", "eval.json", "log.txt", "adapter"])
def test_commands_on_a_run_folder_with_a_link_change_and_send_nothing_outside(
    name: str, trained, places: tuple[Path, Path], capsys
) -> None:
    run, (_, outside) = trained(), places
    safe_files.remove(run.path, name)
    (run.path / name).symlink_to(outside if name == "adapter" else outside / "victim")
    main.main(["report", str(run.path)])
    with contextlib.suppress(UserError):  # of the link itself
        run.write(name, {})
    assert main.main(["publish", str(run.path), "--dry-run"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert [(one.name, one.read_text()) for one in outside.iterdir()] == [("victim", "as it was")]


@pytest.mark.parametrize("to", ["/snapshots", "/snapshots/a", "/a/snapshots/b", "/proc/self"])
def test_link_that_looks_like_the_hub_s_cache_is_refused(to: str, trained, capsys) -> None:
    run = trained()
    (run.path / "more").mkdir()
    for folder, name in ((run.path, "model"), (run.path / "more", "adapter"), (run.path / "more", "model")):
        (folder / name).symlink_to(to)
        for words in (["publish", "--dry-run"], ["evaluate"], ["merge"]):
            assert main.main([words[0], str(run.path), *words[1:]]) == 2
            assert "leads out of its folder" in capsys.readouterr().err
        (folder / name).unlink()


@pytest.mark.parametrize(
    "name", ["quickstart.yaml", "examples", "examples/tiny_llama", "examples/tiny_llama/data"]
)
def test_copy_of_a_recipe_follows_no_link(name: str, places: tuple[Path, Path], capsys) -> None:
    folder, outside = places
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(outside / "new" if name.endswith(".yaml") else outside)
    assert main.main(["recipes", "quickstart", "--copy", str(folder)]) == 2
    assert "finetune follows no link" in capsys.readouterr().err
    assert [entry.name for entry in outside.iterdir()] == ["victim"]


@pytest.mark.parametrize("name", ["merged", "eval.json", "adapter/more.json", "adapter/adapter_config.json"])
def test_commands_on_a_run_folder_with_a_link_to_itself_refuse_it(name: str, trained, capsys) -> None:
    run = trained()
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(run.path / name)
    for words in (["merge"], ["evaluate"], ["export", "--to", "vllm"], ["publish", "--dry-run"]):
        assert main.main([words[0], str(run.path), *words[1:]]) == 2
        assert "leads to itself" in capsys.readouterr().err
    assert main.main(["report", str(run.path)]) == 0


@pytest.mark.parametrize("name", ["config.json", "more.txt", "additional_chat_templates/a.jinja"])
def test_model_or_adapter_with_a_link_to_itself_is_refused(name: str, trained, tmp_path, capsys) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model", copy_function=os.link)
    adapter = shutil.copytree(trained().adapter, tmp_path / "adapter")
    for folder in (model, adapter):
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / name)
    assert main.main(["check", str(QUICKSTART), f"model.name={model}"]) == 2
    assert "leads to itself" in capsys.readouterr().err
    assert main.main(["export", str(adapter), "--to", "vllm", "--output", str(tmp_path / "made")]) == 2
    assert "leads to itself" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["init", "import"])
def test_command_with_an_output_that_cannot_be_written_ends_with_a_message(
    command: str, tmp_path, capsys
) -> None:
    (tmp_path / "sft.yaml").write_text("model_name_or_path: a/b\ndataset_name: c/d\nuse_peft: true\n")
    given = (
        ["--model", str(MODEL), "--data", "a.jsonl"] if command == "init" else [str(tmp_path / "sft.yaml")]
    )
    assert main.main([command, *given, "--output", "/proc/self/recipe.yaml"]) == 2
    assert "finetune can't write to this path" in capsys.readouterr().err
