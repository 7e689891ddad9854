"""A published run names no path of this machine. It can be opened, trained on and merged from the Hub."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard

from finetune.adapters import continue_from
from finetune.cli import main
from finetune.core import library_calls
from finetune.core.errors import UserError
from finetune.data import source_loading
from finetune.experiments.runner import kept_runs
from finetune.experiments.sweep import search_space
from finetune.export.published_text import without_paths
from finetune.hub import client
from finetune.recipe import loader
from finetune.recipe.schema import Data, Source
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder
from support.hub_server import Hub, Repo
from support.paths import DATA, MODEL, QUICKSTART
from support.runs import metrics, run_checks

# huggingface_hub hands httpx its LFS parts as `data` (2.4, lfs.py, _upload_single_part)
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
HERE = [f"model.name={MODEL}", f"data.validation={DATA / 'test.jsonl'}"]


def publish(run: RunFolder, *options: str) -> str:
    """Publish a run as me/notes and return its commit."""
    assert main.main(["publish", str(run.path), "--repo", "me/notes", "--quiet", *options]) == 0
    return run.read("publish.json")["commit"]


def test_a_published_run_is_opened_and_merged(hub: Hub, trained, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("finetune.export.verify_merge.PROBE_ROWS", 2)
    pinned = f"me/notes@{publish(trained())}"
    monkeypatch.chdir(tmp_path)
    assert main.main(["merge", pinned]) == 2
    said = capsys.readouterr()
    assert "./model" in said.err and "model.name=PATH" in said.err and "data.validation=null" in said.err
    folder = RunFolder(Path("runs") / f"notes-{pinned[-40:][:8]}")
    assert f"{pinned} is in {folder.path}" in said.out
    assert main.main(["merge", pinned, *HERE, "--dtype", "float32", "--quiet"]) == 0
    assert folder.read("merge.json")["merged"]["against_tuned"]["same_top"] == 1
    hub.requests.clear()
    assert run_folder.open_run(pinned) == folder and not hub.asked("/resolve/"), "it is in the cache"
    assert main.main(["publish", str(folder.path), "--merged", "--repo", "me/merged", "--quiet"]) == 0
    files = hub.repos["me/merged"].files
    assert {"config.json", "model.safetensors", "merge.json"} <= files.keys()
    assert "adapter_config.json" not in files and str(tmp_path).encode() not in files["merge.json"]


def test_a_published_run_is_evaluated(hub: Hub, trained, tmp_path, monkeypatch, small, capsys) -> None:
    """On another machine the base model and the validation set have other paths. The results are the same."""
    folder = trained()
    pinned = f"me/notes@{publish(folder)}"
    monkeypatch.chdir(tmp_path)
    rows = Path(shutil.copyfile(small[1].partition("=")[2], tmp_path / "elsewhere.jsonl"))
    command = ["evaluate", pinned, HERE[0], f"data.validation={rows}"]
    assert main.main(command) == 0
    assert "is not the validation set of the run" not in capsys.readouterr().out
    (opened,) = (tmp_path / "runs").iterdir()
    assert RunFolder(opened).read("eval.json")["tuned"] == folder.read("eval.json")["tuned"]


def test_a_published_adapter_is_trained_further(hub: Hub, trained, train, capsys) -> None:
    commit = publish(trained())
    other = ["adapter.from_other_base=true", "data.validation=null", HERE[0]]
    second = train(f"adapter.init_from=me/notes@{commit}", *other, name="second")
    assert run_checks(second)["adapter.init_from"]["actual"] == f"all 84 of me/notes@{commit}"
    train(f"adapter.init_from=me/notes@{'0' * 40}", *other, name="third", code=3)
    assert "no such repository or revision" in capsys.readouterr().err
    assert main.main(["check", "recipes/quickstart.yaml", "adapter.init_from=me/notes"]) == 0
    assert "pins it" in capsys.readouterr().out


@pytest.mark.parametrize("token", [True, False])
def test_a_mistyped_folder_is_told_from_a_hub_id(
    token: bool, hub: Hub, tmp_path, monkeypatch, capsys
) -> None:
    """Without a token, the Hub answers 401 for a name that it does not have."""
    monkeypatch.chdir(tmp_path)
    for name in ("models/llama", "runs/first"):
        Path(name).mkdir(parents=True)
    if not token:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere")
        for name in ("models/lama", "runs/frist"):
            hub.fail(f"/{name}/", 401, times=99)
    for key, name, near in (
        ("model.name", "models/lama", "models/llama"),
        ("adapter.init_from", "runs/frist", "runs/first"),
    ):
        given = [
            str(QUICKSTART),
            *HERE,
            f"data.name={DATA / 'test.jsonl'}",
            "data.validation=null",
            f"{key}={name}",
        ]
        assert main.main(["check", *given]) == 0
        assert f"note: {key}: {name} is not a local folder" in capsys.readouterr().out
        assert main.main(["train", *given, "train.output_dir=run", "--quiet"]) == 3
        said = capsys.readouterr().err
        assert "the Hub has no such" in said and "found:     no local folder of this name" in said
        assert f"help:      use the local folder {near}, or check the name" in said
    assert main.main(["check", *given, "adapter.init_from=./runs/frist"]) == 2
    assert "help:      adapter.init_from=runs/first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "answer", "said"),
    [
        ("GET /api/models/me/base", b"null", "can't read the Hub's answer"),
        ("GET /api/models/me/base", b"[]", "can't read the Hub's answer"),
        ("GET /api/models/me/base", b'{"id": "me/base"}', "can't read the Hub's answer"),
        ("tokenizer.json", "cut", "can't reach the Hub"),
        ("config.json", "cut", "can't reach the Hub"),
    ],
)
def test_odd_answers_and_lost_connections_of_the_hub_are_errors_of_the_hub(
    where: str, answer: str | bytes, said: str, hub: Hub, train, capsys
) -> None:
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    hub.add("me/base", **files)
    hub.fail(where, answer, times=99)
    train("model.name=me/base", code=3)
    printed = capsys.readouterr().err
    assert said in printed and "[hub]" in printed


def test_weights_that_were_damaged_before_the_download_are_an_error_of_the_cache(
    hub: Hub, train, capsys
) -> None:
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    hub.add("me/base", **{**files, "model.safetensors": files["model.safetensors"][:5000]})
    train("model.name=me/base", code=3)
    assert "the weights in the Hub's cache are damaged" in capsys.readouterr().err


class Moving(Repo):
    """A repository whose `main` is another commit at each request."""

    def at(self, revision: str) -> str | None:
        if revision == "main":
            self.branches["main"] = next(sha for sha in self.commits if sha != self.branches["main"])
        return super().at(revision)


def test_a_base_whose_branch_moves_is_read_at_one_commit(hub: Hub, train, two_layers, untied, capsys) -> None:
    """It gives config, tokenizer and weights. The run keeps the commit and opens it again."""
    repo = hub.repos["me/base"] = Moving(private=False)
    commits = []
    for folder in (two_layers, untied):
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        commits.append(repo.commit("main", files, folder.name))
    run = train("model.name=me/base", "train.max_steps=4", "--until=1", code=75)
    asked = {line.split("/resolve/")[1].partition("/")[0] for line in hub.requests if "/resolve/" in line}
    (commit,) = asked & set(commits)
    assert len(asked) == 1, asked
    assert f'revision: "{commit}"  # hub: the commit of main' in run.recipe.read_text()
    other = "model.name=me/base", f"model.revision={next(sha for sha in commits if sha != commit)}"
    train(*other, "train.max_steps=4", "--resume", code=4)
    assert f"help:      model.revision={commit}\n" in capsys.readouterr().err
    hub.requests.clear()
    assert main.main(["train", str(run.recipe), "--resume", "train.max_steps=4", "--quiet"]) == 0
    assert not [line for line in hub.requests if "main" in line], "requests name the commit"
    kept = json.loads((run.adapter / "adapter_config.json").read_text())
    assert (kept["base_model_name_or_path"], kept["revision"]) == ("me/base", commit)
    assert run_checks(run)["base model of the adapter"]["actual"] == f"me/base {commit}"
    # The branch has moved, but the run ends with its commit. Its adapter trains on under the branch's name
    steps = len(metrics(run))
    again = [str(run.recipe), "model.revision=main", "train.max_steps=4", "--resume=auto", "--quiet"]
    assert main.main(["train", *again]) == 0
    branch = "model.name=me/base", "model.revision=main", f"adapter.init_from={run.adapter}"
    assert main.main(["check", str(QUICKSTART), *branch]) == 0 and len(metrics(run)) == steps
    # another base has no such commit
    there = loader.load(run.recipe, [f"model.name={two_layers}"])
    assert there.model.revision is None and "you override `model.name`" in "".join(there.origin.notices)
    assert loader.load(run.recipe, ["model.name=me/base"]).model.revision == commit
    given = loader.load(run.recipe, ["model.revision=v1", "model.name=me/other"])
    assert given.model.revision == "v1"


def test_processes_that_one_starts_read_the_same_commit(hub: Hub, monkeypatch) -> None:
    """finetune asks once for a branch. Child processes find the commit in their environment."""
    repo = hub.repos["me/base"] = Moving(private=False)
    commits = [repo.commit("main", {"config.json": b"{}"}, str(number)) for number in range(2)]
    first = client.commit("me/base", "main")
    asked = len(hub.requests)
    assert first in commits and client.commit("me/base", "main") == first and len(hub.requests) == asked
    told = json.loads(os.environ[client.COMMITS])
    assert told == {"me/base@main": first}
    monkeypatch.setenv(client.COMMITS, "{}")
    assert client.commit("me/base", "main") != first, "it has moved"
    with pytest.raises(UserError, match="no such model or revision"):
        client.commit("me/none", "main")


def test_adapter_of_a_branch_that_moves_is_read_at_one_commit(hub: Hub, saved_lora) -> None:
    repo = hub.repos["me/adapter"] = Moving(private=False)
    config = json.loads((saved_lora / "adapter_config.json").read_text())
    for alpha in (7, 32):
        content = json.dumps({**config, "lora_alpha": alpha}).encode()
        repo.commit("main", {"adapter_config.json": content}, str(alpha))
    adapter = loader.load(QUICKSTART, ["adapter.init_from=me/adapter"]).adapter
    found = [continue_from.config_values(adapter)["lora_alpha"] for _ in range(3)]
    found += [continue_from._source_file("me/adapter", "adapter_config.json")["lora_alpha"] for _ in range(2)]
    assert len({*found}) == 1


@pytest.mark.parametrize("sha", [5, [], {"a": 1}, True, "main", None])
def test_odd_commit_of_a_dataset_is_no_commit(sha: object, hub: Hub, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: SimpleNamespace(sha=sha))
    assert client.dataset_commit("me/rows", "v1") == "v1"


def test_folder_in_place_of_a_published_run_is_not_opened(
    hub: Hub, trained, tmp_path, monkeypatch, capsys
) -> None:
    run = trained()
    pinned = f"me/notes@{(commit := publish(run))}"
    monkeypatch.chdir(tmp_path)
    assert main.main(["merge", pinned, *HERE, "--output", "one"]) == 0, "it is fetched"
    assert main.main(["merge", pinned, *HERE, "--output", "two"]) == 0, "it is found"
    fetched = Path("runs") / f"notes-{commit[:8]}"
    (fetched / "adapter").unlink()
    shutil.copytree(run.path / "adapter", fetched / "adapter")
    assert main.main(["merge", pinned, *HERE, "--output", "three"]) == 2
    assert "exists, and holds another run" in capsys.readouterr().err and not Path("three").exists()


def test_commits_of_base_and_adapter_are_part_of_an_experiments_identity(hub: Hub, monkeypatch) -> None:
    for name in ("me/base", "me/adapter"):
        repo = hub.repos[name] = Moving(private=False)
        for number in range(2):
            repo.commit("main", {"config.json": b"{}", "adapter_config.json": b"{}"}, str(number))
    model, adapter = "model.name=me/base", "adapter.init_from=me/adapter"
    for option, key in ((model, search_space.BASE), (adapter, "file of adapter.init_from")):
        recipe, found = loader.load(QUICKSTART, [option]), set[str]()
        for _ in range(2):
            found.add(kept_runs.identity(recipe, []))
            space = search_space.Space(Path("space.yaml"), search_space.Search(), {})
            found.add(search_space.identity(recipe, space, "")[key])
            monkeypatch.setenv(client.COMMITS, "{}")  # of a new process
        assert len(found) == 4, "the branch has moved"


def test_branch_of_a_dataset_is_asked_for_once(hub: Hub, monkeypatch) -> None:
    """Otherwise the prepared data of one commit could be stored under another one."""
    repo = hub.repos["me/rows"] = Moving(private=False)
    commits = [repo.commit("main", {"a.jsonl": b"{}"}, str(number)) for number in range(2)]
    first = client.dataset_commit("me/rows", "main")
    assert first in commits and client.dataset_commit("me/rows", "main") == first
    assert json.loads(os.environ[client.COMMITS]) == {"datasets/me/rows@main": first}
    assert client.dataset_commit("me/none", "v1") == "v1"


def test_each_call_of_the_python_api_reads_the_newest_commit(hub: Hub) -> None:
    """A notebook stays open while the dataset gets another commit."""
    repo = hub.repos["me/rows"] = Repo(private=False)
    asked = library_calls.library_call("tested")(lambda: client.dataset_commit("me/rows", "main"))
    for number in range(2):
        commit = repo.commit("main", {"a.jsonl": b"{}"}, str(number))
        assert asked() == commit


def test_two_revisions_of_a_dataset_are_two_sources(hub: Hub) -> None:
    repo = hub.repos["me/rows"] = Repo(private=False)
    commits = [repo.commit(branch, {"a.jsonl": b"{}"}, branch) for branch in ("main", "v1")]
    both = [Source(name="me/rows", revision=revision) for revision in ("main", "v1")]
    for read in (source_loading.fingerprints, kept_runs.contents):  # of a run, and of an experiment
        assert sorted(read(Data(name=[*both])).values()) == sorted(commits)


def test_full_fine_tuning_goes_up_whole(hub: Hub, trained, tmp_path, monkeypatch) -> None:
    commit = publish(trained("full"), "publish.base_model=org/base")
    files = hub.repos["me/notes"].files
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert "training_args.bin" not in files and b"library_name: transformers" in files["README.md"]
    monkeypatch.chdir(tmp_path)
    opened = run_folder.open_run(f"me/notes@{commit}")
    assert opened.weights == opened.model and (opened.model / "model.safetensors").exists()


def test_of_this_machine_s_paths_only_names_are_said() -> None:
    known = {"/data/my set/train.jsonl": "train.jsonl", "/home/jane": "~", "/": ""}
    said = {
        "sources": [{"source": "/data/my set/train.jsonl"}],
        "data": {"/x/y/task.yaml": "1"},
        "how": "of /a/b/c (x/y), https://h.co/a/b, 3 tokens/s, /home/jane/d/e, </s>",
        "worst": [{"where": "/data/my set/train.jsonl:3", "prompt": "see /usr/share/doc, /home/janet/x"}],
    }
    assert without_paths(said, known) == {
        "sources": [{"source": "train.jsonl"}],
        "data": {"task.yaml": "1"},
        "how": "of c (x/y), https://h.co/a/b, 3 tokens/s, e, </s>",
        "worst": [{"where": "train.jsonl:3", "prompt": "see /usr/share/doc, /home/janet/x"}],
    }


def test_held_out_rows_from_elsewhere_are_known_by_the_file_s_name(hub: Hub, trained, tmp_path) -> None:
    folder, secret = trained(), tmp_path / "acme secret, (new)" / "other.jsonl"
    secret.parent.mkdir()
    secret.write_text("\n".join((DATA / "test.jsonl").read_text().splitlines()[20:23]))
    assert main.main(["evaluate", str(folder.path), f"data.validation={secret}"]) == 0
    other = folder.path / "eval.other.json"  # an earlier version wrote it over the run's own
    assert "acme" in other.read_text() and "acme" not in (folder.path / "eval.json").read_text()
    other.replace(folder.path / "eval.json")
    publish(folder)
    files = hub.repos["me/notes"].files
    assert not [name for name, content in files.items() if b"acme" in content or b"secret" in content]
    result = json.loads(files["eval.json"])
    assert {row["where"] for row in result["worst"]} == {f"other.jsonl:{line}" for line in (1, 2, 3)}
    assert [part["source"] for part in result["sources"]] == ["other.jsonl"]
    (note,) = result["settings"]["notes"]
    assert note.startswith("other.jsonl is not the validation set of the run")


def test_files_of_one_name_stay_apart(hub: Hub, trained, tmp_path) -> None:
    folder, files = trained(), [tmp_path / name / "train.jsonl" for name in "ab"]
    report, result = folder.read("data_report.json"), folder.read("eval.json")
    report["train"]["sources"] = {str(path): path.parent.name * 64 for path in files}
    folder.write("data_report.json", report)
    worst = [{"prompt": "Say it", "where": f"{path}:1"} for path in files]
    folder.write("eval.json", {**result, "worst": worst})
    publish(folder, f"data.name=[{files[0]},{files[1]}]")
    there = hub.repos["me/notes"].files
    report, result = json.loads(there["data_report.json"]), json.loads(there["eval.json"])
    assert report["train"]["sources"] == {"train.jsonl": "a" * 64, "train.jsonl (2)": "b" * 64}
    assert [row["where"] for row in result["worst"]] == ["train.jsonl:1", "train.jsonl (2):1"]


def test_merged_says_what_makes_it(trained, capsys) -> None:
    folder = trained()
    command = ["publish", str(folder.path), "--merged", "--dry-run"]
    assert main.main(command) == 2
    assert f"finetune merge {folder.path}" in capsys.readouterr().err
    for name in ("merged-int8", "merged-int4"):
        (folder.path / name).mkdir()
    folder.write("merge.json", {"merged-int8": {}, "merged-int4": {}})
    assert main.main(command) == 2
    assert "merged-int8, merged-int4" in capsys.readouterr().err


def test_a_quantized_model_s_card_has_its_own_scores(hub: Hub, trained, monkeypatch) -> None:
    monkeypatch.setattr("finetune.export.verify_merge.PROBE_ROWS", 2)
    folder = trained()
    assert main.main(["merge", str(folder.path), "--quantize", "int8", "--quiet"]) == 0
    publish(folder, "--merged")
    written = ModelCard(hub.repos["me/notes"].files["README.md"].decode())
    scores = folder.read("merge.json")["merged-int8"]["scores"]
    loss = next(result for result in written.data.eval_results if result.metric_type == "loss")
    assert loss.metric_value == scores["quantized"]["loss"] != scores["tuned"]["loss"]
    assert "pip install torchao" in written.text


def test_what_is_not_published_there(hub: Hub, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    hub.add("me/other", **{"config.json": b"{}"})
    assert main.main(["evaluate", "me/other@main"]) == 2
    said = capsys.readouterr().err
    assert "no recipe.resolved.yaml" in said and "`finetune publish` has uploaded" in said
    assert not (tmp_path / "runs").exists()
    assert main.main(["evaluate", "me/none@main"]) == 3
    assert main.main(["evaluate", "runs/quikstart"]) == 2 and not hub.asked("quikstart")
    assert "ORGANIZATION/NAME@REVISION" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main.main(["evaluate", "me/none@main"]) == 3
    assert "unset HF_HUB_OFFLINE" in capsys.readouterr().err


def test_a_run_folder_that_moved(trained, tmp_path) -> None:
    folder = trained()
    text = folder.recipe.read_text()
    for path in (str(MODEL), str(DATA)):
        text = text.replace(path, f"/gone/{Path(path).name}")
    gone = json.dumps("/gone/data/test.jsonl")
    text = "\n".join(
        f"  validation: {gone}" if "  validation: " in line else line for line in text.splitlines()
    )
    moved = RunFolder(Path(shutil.copytree(folder.path, tmp_path / "moved")))
    moved.recipe.write_text(text + "\n")
    with pytest.raises(UserError) as raised:
        run_folder.recipe_of(moved)
    assert [problem.key for problem in raised.value.problems] == ["model.name"], (
        "its validation set is in the folder"
    )
    (moved.path / run_folder.HELD_OUT).unlink()
    with pytest.raises(UserError) as raised:
        run_folder.recipe_of(moved)
    assert [problem.key for problem in raised.value.problems] == ["model.name", "data.validation"]
    assert run_folder.recipe_of(moved, files=False).model.name == "/gone/model"
    found = run_folder.recipe_of(moved, [HERE[0], "data.validation=null"])
    assert found.model.name == str(MODEL) and found.data.validation is None
    assert main.main(["publish", str(moved.path), "--dry-run", "--quiet"]) == 0
