"""Publishing, end to end to a Hub on localhost (hub_server.py): what goes up, what never does, what fails."""

import hashlib
import json
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi

from finetune.cli import main
from finetune.data.source_loading import hub_name
from finetune.recipe.schema import Source
from finetune.run_folder.run_folder import RunFolder
from support.hub_server import TOKEN, Hub
from support.paths import MODEL, QUICKSTART, ROOT
from support.soak import soak_except

# huggingface_hub hands httpx its LFS parts as `data` (2.4, lfs.py, _upload_single_part)
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
FILES = {
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
    "chat_template.jinja",
    "data_report.json",
    "environment.json",
    "eval.json",
    "metrics.jsonl",
    "checks.json",
    "recipe.resolved.yaml",
    "tokenizer.json",
    "tokenizer_config.json",
}
TEMPLATE = "additional_chat_templates/tool_use.jinja"


def publish(run: RunFolder, *options: str, code: int = 0) -> None:
    assert main.main(["publish", str(run.path), *options]) == code


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logits(base, adapter: str, **options) -> torch.Tensor:
    from peft import PeftModel

    opened = PeftModel.from_pretrained(base, adapter, **options).eval()
    with torch.no_grad():
        found = opened(input_ids=torch.arange(3, 3999, 37).reshape(4, 27)).logits
    opened.unload()
    return found


def test_a_run_goes_up_privately_and_plain_peft_loads_it(hub: Hub, trained, capsys, small) -> None:
    from transformers import AutoModelForCausalLM

    folder = trained()
    (folder.adapter / "additional_chat_templates").mkdir()
    (folder.adapter / TEMPLATE).write_text("{{ tools }}")  # as transformers saves one of several
    before = contents(folder.path)
    publish(folder, "--repo", "me/notes", "publish.base_model=org/base")
    said = capsys.readouterr()
    repo = hub.repos["me/notes"]
    assert repo.private and repo.log == ["initial commit", f"finetune: {folder.path.name}"]
    assert repo.files.keys() == FILES | {".gitattributes", TEMPLATE}
    assert repo.files["adapter_model.safetensors"] == before["adapter/adapter_model.safetensors"]
    assert {name: old for name, old in contents(folder.path).items() if name != "publish.json"} == before

    here = [str(folder.path.parent), str(ROOT), str(MODEL), str(Path.home()), "examples/tiny_llama"]
    here += [Path(override.partition("=")[2]).parent.as_posix() for override in small]
    for name, content in repo.files.items():
        assert not [path for path in here if path.encode() in content], name
        assert TOKEN.encode() not in content
    config = json.loads(repo.files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "org/base"
    assert 'name: "org/base"' in repo.files["recipe.resolved.yaml"].decode()

    report = folder.read("publish.json")
    assert report["commit"] == repo.branches["main"] and report["url"].endswith(report["commit"])
    digest = hashlib.sha256(before["adapter/adapter_model.safetensors"]).hexdigest()
    assert report["files"]["adapter_model.safetensors"]["hash"] == digest
    assert [check["passed"] for check in report["receipts"]] == [True]
    assert TOKEN not in said.out + said.err + json.dumps(report)
    assert f"finetune evaluate me/notes@{report['commit']}" in said.out

    base = AutoModelForCausalLM.from_pretrained(MODEL)
    there = logits(base, "me/notes", revision=report["commit"])
    assert torch.equal(there, logits(base, str(folder.adapter)))


def test_again_sends_only_what_is_missing(hub: Hub, trained, capsys) -> None:
    folder = trained()
    publish(folder, "--repo", "notes")  # a name alone is the user's own
    repo = hub.repos["me/notes"]
    hub.requests.clear()
    publish(folder, "--repo", "me/notes")
    assert "the repository is up to date" in capsys.readouterr().out
    assert len(repo.log) == 2 and not hub.asked("PUT") and not hub.asked("/commit/")
    folder.write("eval.json", {**folder.read("eval.json"), "samples": []})
    repo.commit("main", {**repo.files, "picture.png": b"of the owner"}, "a picture")
    hub.bodies.clear()
    publish(folder, "--repo", "me/notes")
    sent = [
        json.loads(line) for body in hub.bodies if b'"key": "header"' in body for line in body.splitlines()
    ]
    assert [line["value"].get("path") for line in sent[1:]] == ["eval.json"], "no card: it says the same"
    assert repo.files["picture.png"] == b"of the owner" and "picture.png" in capsys.readouterr().out
    assert json.loads(repo.files["eval.json"])["samples"] == []


def test_publish_dry_run_json_has_the_repository_and_the_files(trained, capsys) -> None:
    words = ["publish", str(trained().path), "--repo", "me/notes", "--public", "--dry-run", "--json"]
    assert main.main(words) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    staged = Path(result["folder"])
    assert (result["repo"], result["revision"], result["private"]) == ("me/notes", None, False)
    assert result["files"].keys() == FILES
    assert result["files"] == {path.name: {"bytes": path.stat().st_size} for path in staged.iterdir()}
    shutil.rmtree(staged)


def test_a_dry_run_needs_no_one(trained, monkeypatch, capsys) -> None:
    from huggingface_hub import ModelCard

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run reached for the network")

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    folder = trained()
    before = contents(folder.path)
    publish(folder, "--dry-run")
    said = capsys.readouterr().out
    assert contents(folder.path) == before, "the run folder is as it was"
    size = folder.adapter / "adapter_model.safetensors"
    assert f"{size.stat().st_size:,}" in said and "private" in said and "local folder" in said
    staged = Path(re.search(r"(\S+finetune-publish-\S+)", said)[1])
    assert {path.name for path in staged.iterdir()} == FILES
    card = ModelCard.load(staged / "README.md")
    assert card.data["model-index"][0]["results"] if "model-index" in card.data else card.data.eval_results
    assert "base_model" not in card.data.to_dict() and "is a local folder and not on the Hub" in card.text
    shutil.rmtree(staged)
    publish(folder, code=2)
    assert "--repo" in capsys.readouterr().err


def test_public_is_said_not_slipped_into(hub: Hub, trained, capsys) -> None:
    folder = trained()
    hub.add("me/open", private=False)
    publish(folder, "--repo", "me/open", code=3)
    assert "the repository is public" in capsys.readouterr().err
    assert hub.repos["me/open"].log == ["initial commit"] and not hub.asked("PUT")
    publish(folder, "--repo", "me/open", "--public")
    publish(folder, "--repo", "me/new", "publish.private=false", "publish.samples=false")
    assert not hub.repos["me/new"].private
    assert json.loads(hub.repos["me/new"].files["eval.json"])["samples"] == []
    hub.add("me/closed")
    publish(folder, "--repo", "me/closed", "--public")
    assert hub.repos["me/closed"].private, "what exists keeps its visibility"
    assert "stays private" in capsys.readouterr().out
    hub.add("me/model", **{"config.json": b"{}"})
    publish(folder, "--repo", "me/model", code=2)
    assert "other weights" in capsys.readouterr().err
    hub.add("me/shards", **{"model.safetensors": b"of one file, which transformers takes before an index"})
    publish(folder, "--repo", "me/shards", code=2)
    assert "found:     model.safetensors" in capsys.readouterr().err
    publish(folder, "--repo", "me/branches", "publish.revision=lora")
    assert "adapter_config.json" not in hub.repos["me/branches"].files
    assert hub.repos["me/branches"].log[-1] == f"finetune: {folder.path.name}"


@pytest.mark.parametrize("last", ["auth_check", "preupload_lfs_files"])
def test_repository_that_becomes_public_meanwhile_gets_no_file(
    last: str, hub: Hub, trained, monkeypatch, capsys
) -> None:
    repo, call = hub.add("me/own"), getattr(HfApi, last)

    def then_public(*given: object, **options: object) -> object:
        answer = call(*given, **options)
        repo.private = False
        return answer

    monkeypatch.setattr(HfApi, last, then_public)
    publish(trained(), "--repo", "me/own", code=3)
    assert "the repository is public" in capsys.readouterr().err
    assert repo.log == ["initial commit"] and not repo.files.keys() & {"eval.json", "README.md"}


@pytest.mark.parametrize(
    ("where", "answer", "said"),
    [
        ("whoami", 401, "hf auth login"),
        ("auth-check", 403, "write access"),
        ("/api/models/me/notes", 404, "has no such repository"),
        ("/commit/", 403, "write access"),
        ("/commit/", 409, "others commit"),
        ("/commit/", 500, "try again"),
        ("repos/create", 429, "try again in 7200 s"),
        ("whoami", "cut", "network"),
        ("whoami", 503, "503"),
    ],
)
def test_what_lasts_is_exit_3_with_what_to_do(where, answer, said, hub: Hub, trained, capsys) -> None:
    folder = trained()
    headers = {"Retry-After": "7200"} if answer == 429 else {}
    hub.fail(where, answer, times=99, **headers)
    publish(folder, "--repo", "me/notes", code=3)
    shown = capsys.readouterr()
    assert said in shown.err and TOKEN not in shown.err + shown.out and "Traceback" not in shown.err
    assert not (folder.path / "publish.json").exists()


@pytest.mark.parametrize(
    ("where", "answer"),
    soak_except(
        [("PUT /store", "cut"), ("/commit/", "cut after"), ("auth-check", "silence"), ("/commit/", 429)],
        [
            ("whoami", 500),
            ("repos/create", "cut"),
            ("preupload", 503),
            ("PUT /store", 500),
            ("PUT /store", "cut"),
            ("/commit/", 409),
            ("/commit/", "cut"),
            ("/commit/", "cut after"),
            ("auth-check", "silence"),
            ("/commit/", 429),
            ("validate-yaml", 502),
        ],
    ),
)
def test_what_passes_is_tried_again(where, answer, hub: Hub, trained, monkeypatch) -> None:
    """A cut before the commit, and one after it arrived, both end in one commit."""
    folder = trained()
    monkeypatch.setattr("finetune.hub.client.SILENCE", 0.5)
    hub.fail(where, answer, **({"Retry-After": "0"} if answer == 429 else {}))
    publish(folder, "--repo", "me/notes")
    repo = hub.repos["me/notes"]
    assert len(repo.log) == 2 and repo.files.keys() >= FILES
    assert folder.read("publish.json")["commit"] == repo.branches["main"]


def test_retry_after_is_waited_for(hub: Hub, trained, monkeypatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    hub.fail("whoami", 429, **{"Retry-After": "17"})
    publish(trained(), "--repo", "me/notes")
    assert 17 in waited


def test_an_upload_that_broke_off_goes_on(hub: Hub, trained) -> None:
    folder = trained()
    hub.fail("/commit/", 500, times=4)
    publish(folder, "--repo", "me/notes", code=3)
    assert hub.asked("PUT /store") == 1 and hub.repos["me/notes"].log == ["initial commit"]
    publish(folder, "--repo", "me/notes")
    assert hub.asked("PUT /store") == 1, "the weights are there already"
    assert hub.repos["me/notes"].files.keys() >= FILES


@pytest.mark.parametrize(
    ("user", "repo", "said"),
    [
        ({"name": "me", "auth": {"accessToken": {"role": "read"}}}, "me/notes", "read token"),
        (
            {"name": "me", "auth": {"accessToken": {"role": "fineGrained", "fineGrained": {"scoped": []}}}},
            "me/a",
            "fine",
        ),
        ({"name": "you", "auth": {"accessToken": {"role": "write"}}}, "me/notes", "has no write access"),
    ],
)
def test_a_token_that_may_not_write(user, repo, said, hub: Hub, trained, capsys) -> None:
    hub.users[TOKEN] = user
    publish(trained(), "--repo", repo, code=3)
    assert said in capsys.readouterr().err and not hub.repos


def test_a_fine_grained_token_that_may(hub: Hub, trained) -> None:
    scope = {"entity": {"type": "org", "name": "team"}, "permissions": ["repo.content.read", "repo.write"]}
    token = {"role": "fineGrained", "fineGrained": {"scoped": [scope]}}
    hub.users[TOKEN] = {"name": "me", "orgs": ["team"], "auth": {"accessToken": token}}
    publish(trained(), "--repo", "team/notes")
    assert hub.repos["team/notes"].private


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "a" * 30,
        "sk-" + "b" * 24,
        "ghp_" + "c" * 36,
        "AKIA" + "D" * 16,
        "WANDB_API_KEY=" + "e" * 40,
        "aws_secret_access_key = " + "f" * 40,
        "-----BEGIN RSA PRIVATE KEY-----",
        "a token that looks like none",
    ],
)
def test_a_secret_stops_it(secret, hub: Hub, trained, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if secret.startswith("a token"):
        monkeypatch.setenv("HF_TOKEN", secret)
    folder = trained()
    result = folder.read("eval.json")
    result["samples"][0]["reference"] = f"the key: {secret}"
    (folder.path / "eval.json").write_text(json.dumps(result, indent=1))  # `folder.write` would mask it
    publish(folder, "--dry-run", code=2)
    publish(folder, "--repo", "me/notes", code=2)
    shown = capsys.readouterr()
    line = 1 + (folder.path / "eval.json").read_text().partition("the key")[0].count("\n")
    assert f"eval.json:{line}" in shown.err and "****" in shown.err
    assert secret not in shown.err + shown.out and not hub.repos
    assert not list(tmp_path.glob("finetune-publish-*"))


def test_data_sets_of_the_hub_are_named_by_id(hub: Hub, trained) -> None:
    from huggingface_hub import ModelCard

    folder = trained()
    report = folder.read("data_report.json")
    source = Source(name="HuggingFaceH4/no_robots", subset="en", split="train")
    report["train"]["sources"] |= {hub_name(source): "1" * 40}
    folder.write("data_report.json", report)
    publish(folder, "--repo", "me/notes")
    assert ModelCard(hub.repos["me/notes"].files["README.md"].decode()).data.datasets == [source.name]


def test_a_card_that_the_hub_refuses(hub: Hub, trained, capsys) -> None:
    publish(trained(), "--repo", "me/notes", "publish.license=our-own", code=3)
    assert "license must be one of" in capsys.readouterr().err and not hub.asked("PUT")


def test_no_token(hub: Hub, trained, monkeypatch, capsys) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere")
    publish(trained(), "--repo", "me/notes", code=3)
    assert "hf auth login" in capsys.readouterr().err and not hub.requests


def test_what_would_fail_at_the_end_fails_before_the_start(hub: Hub, train, capsys, tmp_path) -> None:
    hub.add("me/open", private=False)
    folder = train("publish.repo=me/open", code=3)
    assert "the repository is public" in capsys.readouterr().err and not folder.path.exists()
    hub.users[TOKEN]["auth"] = {"accessToken": {"role": "read"}}
    folder = train("publish.repo=me/notes", code=3)
    said = capsys.readouterr().err
    assert "publish.repo=null" in said and not folder.path.exists() and not hub.asked("/commit/")
    hub.requests.clear()
    assert main.main(["check", str(QUICKSTART), "publish.repo=me/notes"]) == 0 and not hub.requests
    assert main.main(["check", str(QUICKSTART), "publish.repo=me/not--this"]) == 2
    assert main.main(["check", str(QUICKSTART), "publish.base_model=/a/b"]) == 2


def test_a_push_that_fails_does_not_fail_the_run(hub: Hub, small, tmp_path, capsys) -> None:
    folder = RunFolder(tmp_path / "run")
    short = [
        "train.max_steps=1",
        "train.warmup_steps=0",
        "train.effective_batch_size=4",
        "eval.max_new_tokens=2",
    ]
    hub.fail("/commit/", 403, times=9)
    command = [
        "train",
        str(QUICKSTART),
        *short,
        small[0],
        "data.validation=null",
        "eval.forgetting=false",
        "publish.repo=me/notes",
    ]
    assert main.main([*command, f"train.output_dir={folder.path}"]) == 0
    said = capsys.readouterr()
    assert "finetune will publish the run to me/notes (private)" in said.out, "at its start"
    for text in (said.err, (folder.path / "log.txt").read_text()):
        assert (
            "finetune did not publish the run" in text
            and f"finetune publish {folder.path} --repo me/notes" in text
        )
    assert hub.repos["me/notes"].log == ["initial commit"]
    hub.faults.clear()
    publish(folder, "--repo", "me/notes")
    assert hub.repos["me/notes"].files.keys() >= FILES, "the retry needs nothing else"
