"""Check access to the Hugging Face Hub, and upload and download files with huggingface_hub.

huggingface_hub retries uploads of files. It does not retry whoami, create_repo, repo_info and commits
(version 2.4), so this module retries them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from dataclasses import replace
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core.errors import Exit, Problem, UserError
from finetune.core.paths import similar_folder
from finetune.core.privacy import masked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from huggingface_hub import HfApi

COMMIT = re.compile(r"[0-9a-f]{40}")
# Environment variable with the commits of branches that the parent process has resolved.
COMMITS = "FINETUNE_COMMITS"
# Seconds before each retry.
PAUSES = (1.0, 2.0, 4.0, 8.0)
# The longest pause that the Hub may ask for, in seconds.
LONGEST_PAUSE = 300
# Seconds without a byte after which a connection counts as lost.
SILENCE = 300.0
TRANSIENT = (408, 429, 500, 502, 503, 504)
# Another commit came first.
CONFLICTS = (409, 412)
ODD_ANSWER = "finetune can't read the Hub's answer"
TOKENS = "https://huggingface.co/settings/tokens"
NO_TOKEN = f"run `hf auth login`, or set HF_TOKEN to a token with write access: {TOKENS}"
REMEDIES = {
    401: f"run `hf auth login`, or set HF_TOKEN to another token: {TOKENS}",
    403: f"use a token with write access to the repository: {TOKENS}",
    404: "check the name. A private repository needs a token with access",
    409: "try again, or set another publish.revision (others commit at the same time)",
    412: "try again, or set another publish.revision (others commit at the same time)",
    429: "try again later (the Hub limits your requests)",
}


class Listed(NamedTuple):
    """A file of a repository."""

    size: int
    digest: str
    """sha256 of a large file, or git's own id of a small file."""
    large: bool


class Pushed(NamedTuple):
    commit: str
    sent: list[str]
    """New and changed files; empty: no commit was made."""
    listed: dict[str, Listed]
    """The files of the repository at that commit."""


def split(name: str) -> tuple[str, str | None]:
    """Split `organization/name@revision` into the repository and the revision, `None` if there is none.

    A web address stays whole, because messages mask the password before its `@`.
    """
    if ":/" in name:
        return name, None
    repo, _, revision = name.partition("@")
    return repo, revision or None


def check_name(repo: str, key: str = "publish.repo") -> None:
    """Check that `repo` can be a repository's name (exit 2)."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(
            Problem(
                "this text can't be the name of a repository",
                key,
                found=repo,
                expected="organization/name or name, with at most 96 letters, digits, - _ and .",
                fix="name a repository such as my-organization/my-model",
                code="publish-target",
            )
        ) from error


def token() -> str:
    """Return the token of the environment or of `hf auth login` (exit 3 without one)."""
    found = any_token()
    if not found:
        raise UserError(
            Problem("finetune has no token for the Hub", fix=NO_TOKEN, code="hub"), code=Exit.ENVIRONMENT
        )
    return found


def any_token() -> str:
    """Return the token; the empty string if there is none."""
    from huggingface_hub import get_token

    return get_token() or ""


def endpoint() -> str:
    """Return the address of the Hub (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def prepare(repo: str, *, private: bool, revision: str | None) -> tuple[str, list[str]]:
    """Check that this token may write to a repository. Create an empty repository if it does not exist.

    Returns:
        The full name of the repository, and notes.

    Raises:
        UserError: the repository is public but must be private, or the token is missing or may not write
            (exit 3).
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    check_name(repo)
    api, notes = HfApi(token=token()), []
    with explained(repo):
        me = patiently(api.whoami)
        repo = repo if "/" in repo else f"{me['name']}/{repo}"
        _check_role(me, repo)
        try:
            info = patiently(api.repo_info, repo)
        except RepositoryNotFoundError:
            patiently(api.create_repo, repo, private=private, exist_ok=True)
            info = patiently(api.repo_info, repo)
            notes.append(f"{repo} is new on the Hub, {'private' if info.private else 'public'} and empty")
        if private:
            _refuse_public(info, repo)
        if info.private and not private:
            notes.append(f"{repo} stays private: its settings on the Hub decide what is public")
        patiently(api.auth_check, repo, write=True)
        if revision:
            patiently(api.create_branch, repo, branch=revision, exist_ok=True)
    return repo, notes


def _refuse_public(info: Any, repo: str) -> None:
    """Refuse a repository that is public, although `publish.private` asks for a private one (exit 3)."""
    if not info.private:
        raise UserError(
            Problem(
                "the repository is public",
                "publish.repo",
                "",
                repo,
                "a private repository (publish.private: true)",
                "add --public, name another --repo, or make the repository private in its settings",
                code="publish-target",
            ),
            code=Exit.ENVIRONMENT,
        )


def _check_role(me: dict[str, Any], repo: str) -> None:
    """Refuse a token that can't write, before any request about the repository (exit 3)."""
    granted = me.get("auth", {}).get("accessToken", {})
    role, scopes = granted.get("role"), granted.get("fineGrained", {}).get("scoped")
    may = role != "read"
    if role == "fineGrained" and scopes is not None:
        names = {repo, repo.partition("/")[0]}
        may = any(
            scope.get("entity", {}).get("name") in names and "repo.write" in scope.get("permissions", ())
            for scope in scopes
        )
    if not may:
        raise UserError(
            Problem(
                "the token has no write access",
                "publish.repo",
                repo,
                f"a {role} token of {me.get('name')}",
                fix=REMEDIES[403],
                code="hub",
            ),
            code=Exit.ENVIRONMENT,
        )


def listing(api: HfApi, repo: str, commit: str | None) -> dict[str, Listed]:
    """Return the files of a repository at a commit, by name."""
    from huggingface_hub.hf_api import RepoFile

    entries = patiently(lambda: list(api.list_repo_tree(repo, recursive=True, revision=commit)))
    return {
        entry.path: Listed(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id, bool(entry.lfs))
        for entry in entries
        if isinstance(entry, RepoFile)
    }


def same(path: Path, there: Listed | None) -> bool:
    """Return whether a local file equals the file in the repository byte for byte."""
    from huggingface_hub.utils.sha import git_hash

    if there is None or path.stat().st_size != there.size:
        return False
    return (sha256(path) if there.large else git_hash(path.read_bytes())) == there.digest


def sha256(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def upload(
    repo: str, files: dict[str, Path], message: str, revision: str | None, *, private: bool = False
) -> Pushed:
    """Upload new and changed files to the repository in one commit.

    The commit names its parent. If another commit came first, or if this commit arrived although the
    connection was lost, the Hub reports a conflict, and this function compares the files again.

    Args:
        files: name in the repository -> local file.
        private: refuse a repository that is public, or becomes public before the commit.

    Raises:
        UserError: the repository holds other weights (exit 2), is public, or refuses the files (exit 3).
    """
    from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
    from huggingface_hub.errors import HfHubHTTPError

    api, sent, conflicts = HfApi(token=token()), dict[str, None](), 0
    with explained(repo):
        while True:
            info = patiently(api.repo_info, repo, revision=revision)
            if private:
                _refuse_public(info, repo)
            head = info.sha
            there = listing(api, repo, head)
            missing = [name for name, path in files.items() if not same(path, there.get(name))]
            if not missing:
                return Pushed(head, list(sent), there)
            clash = {"adapter_config.json", "config.json", "model.safetensors"} & there.keys() - files.keys()
            if clash:
                raise UserError(
                    Problem(
                        "the repository holds other weights",
                        "publish.repo",
                        repo,
                        ", ".join(sorted(clash)),
                        fix="name another --repo",
                        why="libraries would load them in place of yours",
                        code="publish-target",
                    )
                )
            sent |= dict.fromkeys(missing)
            if "README.md" in missing:  # an invalid card is an error before gigabytes are sent
                patiently(ModelCard.load(files["README.md"]).validate)
            additions = [CommitOperationAdd(name, str(files[name])) for name in missing]
            api.preupload_lfs_files(repo, additions, revision=revision, free_memory=False)
            if private:  # gigabytes take hours
                _refuse_public(patiently(api.repo_info, repo), repo)
            about = {"commit_message": message, "revision": revision, "parent_commit": head}
            try:
                commit = patiently(api.create_commit, repo, additions, **about).oid
                return Pushed(commit, list(sent), listing(api, repo, commit))
            except HfHubHTTPError as error:
                conflicts += 1
                if error.response.status_code not in CONFLICTS or conflicts > len(PAUSES):
                    raise
                time.sleep(PAUSES[conflicts - 1])


def download(name: str, patterns: list[str], key: str = "") -> tuple[Path, str]:
    """Download files of `organization/name@revision` to the Hub's cache.

    Returns:
        The folder of the files, and the commit.
    """
    from huggingface_hub import snapshot_download

    repo, revision = split(name)
    check_name(repo, key)
    with explained(repo, read=True):
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    return folder, folder.name


def commit(name: str, revision: str) -> str:
    """Return the current commit of a branch or tag of a model.

    A branch may move while files are read. So a process asks only once, and passes the commit to the
    processes that it starts. Without a network, the commit comes from the Hub's cache.

    Raises:
        UserError: no model can have this name (exit 2). There is no such model, or the Hub can't be reached
            (exit 3).
    """
    check_name(name, "model.name")
    return _remembered(f"{name}@{revision}", revision, lambda: _asked(name, revision))


def dataset_commit(name: str, revision: str) -> str:
    """Return the current commit of a branch or tag of a dataset, as `commit` does.

    Without an answer of the Hub, the revision itself is returned, and loading the dataset reports the reason.
    """
    return _remembered(f"datasets/{name}@{revision}", revision, lambda: _asked_dataset(name, revision))


def _remembered(key: str, revision: str, ask: Callable[[], str]) -> str:
    known = json.loads(os.environ.get(COMMITS) or "{}")
    if COMMIT.fullmatch(revision) or key in known:
        return known.get(key, revision)
    known[key] = ask()
    os.environ[COMMITS] = json.dumps(known)
    return known[key]


def _asked_dataset(name: str, revision: str) -> str:
    from huggingface_hub import HfApi

    try:
        found: object = HfApi().dataset_info(name, revision=revision).sha
    except Exception:  # no network, offline mode, gated dataset, or an odd answer
        return revision
    return found if isinstance(found, str) and COMMIT.fullmatch(found) else revision


def _asked(name: str, revision: str) -> str:
    from huggingface_hub import snapshot_download

    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": ["config.json"]}
    try:
        return Path(patiently(snapshot_download, name, **wanted)).name
    except Exception as error:  # the Hub's library does not check the types in the Hub's answers
        if _response(error) is None:
            with contextlib.suppress(OSError, ValueError):
                return Path(snapshot_download(name, local_files_only=True, **wanted)).name
        raise UserError(unread(error, name, revision), code=Exit.ENVIRONMENT) from error


def patiently(call: Callable[..., Any], *arguments: object, **options: object) -> Any:
    """Retry a call after errors of the network or the Hub, with pauses as long as the Hub asks for."""
    from huggingface_hub.utils import get_session

    pauses = list(PAUSES)
    while True:
        try:
            get_session().timeout = SILENCE  # the default has no limit
            return call(*arguments, **options)
        except (http_error(), JSONDecodeError) as error:  # validate-yaml reads an error page as JSON
            response = _response(error)
            retry_after = response.headers.get("Retry-After", "") if response is not None else ""
            pause = float(retry_after) if retry_after.isdigit() else 0.0
            lasting = response is not None and response.status_code not in TRANSIENT
            if not pauses or lasting or pause > LONGEST_PAUSE:
                raise
            time.sleep(max(pause, pauses.pop(0)))


def http_error() -> type[Exception]:
    """Return the error class of the network and the Hub: httpx's in huggingface_hub 1, httpx2's in 2."""
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]  (its own base)

    return HTTPError


def _response(error: BaseException | None) -> Any:
    """Return the Hub's response behind an error or its cause; `None` if there was no response."""
    while error is not None:
        if getattr(error, "response", None) is not None:
            return error.response  # pyright: ignore[reportAttributeAccessIssue]  (asked for above)
        error = error.__cause__
    return None


@contextlib.contextmanager
def explained(repo: str, *, read: bool = False) -> Iterator[None]:
    """Turn errors of the Hub and the network into one message with a remedy and without the token (exit 3).

    Args:
        read: whether the name may have been meant as a local folder.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the Hub's library does not check the types in the Hub's answers
        problem = _problem(error, repo)
        problem = _nor_here(problem, repo) if read and _status(error) in (None, 404) else problem
        raise UserError(problem, code=Exit.ENVIRONMENT) from error


def _status(error: Exception) -> int | None:
    """Return the status code of the Hub's response; `None` if there was no response.

    Without a token, the Hub answers 401 for repositories that do not exist. This counts as 404.
    """
    response = _response(error)
    status = None if response is None else response.status_code
    return 404 if status == 401 and not any_token() else status


def _nor_here(problem: Problem, name: str) -> Problem:
    """Extend the problem of a name that is neither on the Hub nor a local folder: it may be a wrong path."""
    near = similar_folder(name)
    fix = f"use the local folder {near}, or {problem.fix}" if near else problem.fix
    found = f"no local folder of this name; on the Hub: {problem.found}"[:300]
    return replace(problem, found=found, fix=fix)


def unread(error: Exception, name: str, revision: str) -> Problem:
    """Return why a model can't be read, from the Hub's response or from the lack of one."""
    from huggingface_hub import constants, try_to_load_from_cache

    response, page, status = _response(error), f"{endpoint()}/{name}", _status(error)
    found = masked(next(iter(str(error).strip().splitlines()), ""))
    if response is None and is_odd_answer(error):
        what, found, fix = ODD_ANSWER, f"{type(error).__name__}: {found}", "check HF_ENDPOINT"
    elif response is None:
        files = ("config.json", "tokenizer.json", "model.safetensors")
        cached = [file for file in files if try_to_load_from_cache(name, file, revision=revision)]
        missing = ", ".join(file for file in files if file not in cached)
        found = f"not in the Hub's cache: {missing or 'a part of its weights'}"
        what, fix = "finetune can't reach the Hub", "check the network and HF_ENDPOINT"
        if constants.is_offline_mode():
            what, fix = "the Hub's library is in offline mode", "unset HF_HUB_OFFLINE"
        fix += f", or download the model elsewhere: hf download {name} --revision {revision}"
    elif response.headers.get("X-Error-Code") == "GatedRepo" or status == 403:
        what = f"the model is gated, and {'this token has' if any_token() else 'you have'} no access"
        fix = f"accept the terms on {page}, then run `hf auth login`"
    elif status == 401:
        what, fix = "the Hub does not know this token", REMEDIES[401]
    elif status == 404:
        what, fix = "the Hub has no such model or revision, or the token has no access", REMEDIES[404]
    else:
        what, fix = f"the Hub answers with status {status}", "try again later"
    problem = Problem(what, "model.name", found=f"{name}@{revision}: {found}"[:300], fix=fix, code="hub")
    return _nor_here(problem, name) if status in (None, 404) else problem


def is_odd_answer(error: Exception) -> bool:
    """Return whether the Hub's library failed on an answer that has another form than the Hub's."""
    return not isinstance(error, (http_error(), OSError, RuntimeError, ValueError))


def _problem(error: Exception, repo: str) -> Problem:
    from huggingface_hub import constants

    response, said = _response(error), " ".join(str(error).split())
    if response is None:
        cause = error.__cause__
        said += f" {type(cause).__name__}: {cause}" if cause else ""
        what, fix = "finetune can't reach the Hub", "check the network and HF_ENDPOINT, and try again"
        what = ODD_ANSWER if is_odd_answer(error) else what
        if constants.is_offline_mode():
            what, fix = "the Hub's library is in offline mode", "unset HF_HUB_OFFLINE"
        elif isinstance(error, ValueError) and not isinstance(error, JSONDecodeError):
            what, fix = "the Hub does not accept the metadata of the model card", ""
    else:
        status, said = _status(error), getattr(error, "server_message", None) or said
        wait = response.headers.get("Retry-After")
        known = {401: "the Hub does not know this token", 403: "the token has no write access"}
        known |= {404: "the Hub has no such repository or revision, or the token has no access"}
        what = known.get(status or 0, f"the Hub answers with status {status}")
        fix = f"try again in {wait} s" if wait else REMEDIES.get(status or 0, "try again later")
        said = f"{response.status_code}: {said}"
    return Problem(what, where=repo, found=masked(said)[:300], fix=fix, code="hub")
