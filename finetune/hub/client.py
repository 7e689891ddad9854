"""The Hub at the other end of the wire: who we are there, what we may do to a repository, files up and down.

huggingface_hub does the talking. It tries again by itself while it sends files; whoami, create_repo,
repo_info and the commit it asks only once (2.4), so these are asked again here.
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
COMMITS = "FINETUNE_COMMITS"  # of the environment: what branches were for the process that started this one
PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each further try
LONGEST_PAUSE = 300  # seconds that are waited because the Hub says so
SILENCE = 300.0  # seconds without a byte, after which a connection counts as cut
TRANSIENT = (408, 429, 500, 502, 503, 504)
CONFLICTS = (409, 412)  # someone else committed meanwhile
TOKENS = "https://huggingface.co/settings/tokens"
NO_TOKEN = f"HF_TOKEN in the environment, or `hf auth login`; one that may write: {TOKENS}"
REMEDIES = {
    401: f"`hf auth login`, or another HF_TOKEN: {TOKENS}",
    403: f"a token that may write there (fine-grained: write access to the repository): {TOKENS}",
    404: "check the name; a private repository needs a token that may see it",
    409: "others commit to it all the time: try again, or another publish.revision",
    412: "others commit to it all the time: try again, or another publish.revision",
    429: "the Hub asks for patience: try again later",
}


class Listed(NamedTuple):
    """A file of a repository."""

    size: int
    digest: str
    """sha256 of a large file, git's own id of a small one."""
    large: bool


class Pushed(NamedTuple):
    commit: str
    sent: list[str]
    """Files that were not there yet, or were others; none: no commit was made."""
    listed: dict[str, Listed]
    """What the repository holds at that commit."""


def split(name: str) -> tuple[str, str | None]:
    """`organisation/name@revision` -> repository, and revision if there is one."""
    repo, _, revision = name.partition("@")
    return repo, revision or None


def check_name(repo: str, key: str = "publish.repo") -> None:
    """Whether `repo` can be a repository's name (exit 2)."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        expected = "organisation/name, or a name: letters, digits, - _ . and at most 96 of them"
        raise UserError(Problem("not a repository's name", key, found=repo, expected=expected)) from error


def token() -> str:
    """The token of the environment or of `hf auth login` (exit 3 without one)."""
    found = any_token()
    if not found:
        raise UserError(Problem("there is no token for the Hub", fix=NO_TOKEN), code=Exit.ENVIRONMENT)
    return found


def any_token() -> str:
    """The token, or the empty string."""
    from huggingface_hub import get_token

    return get_token() or ""


def endpoint() -> str:
    """Address of the Hub (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def prepare(repo: str, *, private: bool, revision: str | None) -> tuple[str, list[str]]:
    """A repository that this token may write to; made, empty, if it is not there yet.

    Returns:
        Its whole name, and notes.

    Raises:
        UserError: it is public and a private one is wanted; no token, or none that may (exit 3).
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
        if private and not info.private:
            fix = "--public (publish.private: false), another --repo, or make it private in its settings"
            what, expected = "this repository is public already", "a private one (publish.private: true)"
            problem = Problem(what, "publish.repo", found=repo, expected=expected, fix=fix)
            raise UserError(problem, code=Exit.ENVIRONMENT)
        if info.private and not private:
            notes.append(f"{repo} is private and stays so: what is public is decided in its settings")
        patiently(api.auth_check, repo, write=True)
        if revision:
            patiently(api.create_branch, repo, branch=revision, exist_ok=True)
    return repo, notes


def _check_role(me: dict[str, Any], repo: str) -> None:
    """A token that can't write, told before anything is asked of the repository (exit 3)."""
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
        found = f"a {role} token of {me.get('name')}"
        problem = Problem("the token may not write", "publish.repo", repo, found, fix=REMEDIES[403])
        raise UserError(problem, code=Exit.ENVIRONMENT)


def listing(api: HfApi, repo: str, commit: str | None) -> dict[str, Listed]:
    """The files of a repository at a commit, by name."""
    from huggingface_hub.hf_api import RepoFile

    entries = patiently(lambda: list(api.list_repo_tree(repo, recursive=True, revision=commit)))
    return {
        entry.path: Listed(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id, bool(entry.lfs))
        for entry in entries
        if isinstance(entry, RepoFile)
    }


def same(path: Path, there: Listed | None) -> bool:
    """Whether a file here is byte for byte the one there."""
    from huggingface_hub.utils.sha import git_hash

    if there is None or path.stat().st_size != there.size:
        return False
    return (sha256(path) if there.large else git_hash(path.read_bytes())) == there.digest


def sha256(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def upload(repo: str, files: dict[str, Path], message: str, revision: str | None) -> Pushed:
    """Bring `files` (name there -> file here) to the repository, in one commit of those that it lacks.

    A commit stands on the head that was looked at. So one that arrived although the connection was cut, or
    another's in between, is a conflict, after which it is looked again.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
    from huggingface_hub.errors import HfHubHTTPError

    api, sent, conflicts = HfApi(token=token()), dict[str, None](), 0
    with explained(repo):
        while True:
            head = patiently(api.repo_info, repo, revision=revision).sha
            there = listing(api, repo, head)
            missing = [name for name, path in files.items() if not same(path, there.get(name))]
            if not missing:
                return Pushed(head, list(sent), there)
            clash = {"adapter_config.json", "config.json", "model.safetensors"} & there.keys() - files.keys()
            if clash:
                what = "the repository holds other weights, which would load in their place"
                fix = "another --repo"
                raise UserError(Problem(what, "publish.repo", repo, ", ".join(sorted(clash)), fix=fix))
            sent |= dict.fromkeys(missing)
            if "README.md" in missing:  # known before gigabytes are sent, not after
                patiently(ModelCard.load(files["README.md"]).validate)
            additions = [CommitOperationAdd(name, str(files[name])) for name in missing]
            api.preupload_lfs_files(repo, additions, revision=revision, free_memory=False)
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
    """Files of `organisation/name@revision`, in the Hub's cache -> their folder, and the commit."""
    from huggingface_hub import snapshot_download

    repo, revision = split(name)
    check_name(repo, key)
    with explained(repo, read=True):
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    return folder, folder.name


def commit(name: str, revision: str) -> str:
    """The commit that a branch or tag of a model is now: it may move while files are read, so it is asked
    once by a process and all that it starts.

    Without a network, the one that the Hub's cache has of it.

    Raises:
        UserError: there is no such model, or no way to it (exit 3).
    """
    known, key = json.loads(os.environ.get(COMMITS, "{}")), f"{name}@{revision}"
    if COMMIT.fullmatch(revision) or key in known:
        return known.get(key, revision)
    known[key] = _asked(name, revision)
    os.environ[COMMITS] = json.dumps(known)
    return known[key]


def _asked(name: str, revision: str) -> str:
    from huggingface_hub import snapshot_download

    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": ["config.json"]}
    try:
        return Path(patiently(snapshot_download, name, **wanted)).name
    except (http_error(), OSError, ValueError) as error:
        if _response(error) is None:
            with contextlib.suppress(OSError, ValueError):
                return Path(snapshot_download(name, local_files_only=True, **wanted)).name
        raise UserError(unread(error, name, revision), code=Exit.ENVIRONMENT) from error


def patiently(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call again while the network or the Hub stumbles, after a pause, or the one the Hub asks for."""
    from huggingface_hub.utils import get_session

    pauses = list(PAUSES)
    while True:
        try:
            get_session().timeout = SILENCE  # it would wait for ever
            return call(*arguments, **options)
        except (http_error(), JSONDecodeError) as error:  # validate-yaml reads an error page as JSON
            response = _response(error)
            asked = response.headers.get("Retry-After", "") if response is not None else ""
            pause = float(asked) if asked.isdigit() else 0.0
            lasting = response is not None and response.status_code not in TRANSIENT
            if not pauses or lasting or pause > LONGEST_PAUSE:
                raise
            time.sleep(max(pause, pauses.pop(0)))


def http_error() -> type[Exception]:
    """What each failure of the network or the Hub is: httpx's in huggingface_hub 1, httpx2's in 2."""
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]  (its own base)

    return HTTPError


def _response(error: BaseException | None) -> Any:
    """The Hub's answer that an error, or what caused it, came of; `None`: there was no answer."""
    while error is not None:
        if getattr(error, "response", None) is not None:
            return error.response  # pyright: ignore[reportAttributeAccessIssue]  (asked for above)
        error = error.__cause__
    return None


@contextlib.contextmanager
def explained(repo: str, *, read: bool = False) -> Iterator[None]:
    """What the Hub or the network refuses, in one message with what to do (exit 3), and never the token.

    Args:
        read: the name may have been meant for a folder here.
    """
    try:
        yield
    except (http_error(), OSError, RuntimeError, ValueError) as error:
        problem = _problem(error, repo)
        problem = _nor_here(problem, repo) if read and _status(error) in (None, 404) else problem
        raise UserError(problem, code=Exit.ENVIRONMENT) from error


def _status(error: Exception) -> int | None:
    """The number of the Hub's answer; 404 also where, asked without a token, it answers 401 to what it has
    not; `None`: there was no answer."""
    response = _response(error)
    status = None if response is None else response.status_code
    return 404 if status == 401 and not any_token() else status


def _nor_here(problem: Problem, name: str) -> Problem:
    """Of a name that is neither on the Hub nor a folder here: it may be a path with a slip in it."""
    near = similar_folder(name)
    fix = f"{near}, which is here; or {problem.fix}" if near else problem.fix
    return replace(problem, found=f"no such folder here; asked on the Hub: {problem.found}"[:300], fix=fix)


def unread(error: Exception, name: str, revision: str) -> Problem:
    """Why a model can't be read, told apart by the Hub's answer, or by there being none."""
    from huggingface_hub import constants, try_to_load_from_cache

    response, page, status = _response(error), f"{endpoint()}/{name}", _status(error)
    found = masked(next(iter(str(error).strip().splitlines()), ""))
    if response is None:
        files = ("config.json", "tokenizer.json", "model.safetensors")
        cached = [file for file in files if try_to_load_from_cache(name, file, revision=revision)]
        missing = ", ".join(file for file in files if file not in cached)
        found = f"not in the Hub's cache: {missing or 'a part of its weights'}"
        what, fix = "can't be had: the Hub can't be reached", "the network, or HF_ENDPOINT"
        if constants.is_offline_mode():
            what, fix = "can't be had: the Hub's library is in offline mode", "unset HF_HUB_OFFLINE"
        fix += f"; or fetch it where there is a network: hf download {name} --revision {revision}"
    elif response.headers.get("X-Error-Code") == "GatedRepo" or status == 403:
        what = f"is gated, and {'this token has' if any_token() else 'without a token there is'} no access"
        fix = f"accept its terms on {page}, then `hf auth login` or HF_TOKEN of that account"
    elif status == 401:
        what, fix = "the Hub does not know this token", REMEDIES[401]
    elif status == 404:
        what, fix = "no such model or revision, or not for this token", REMEDIES[404]
    else:
        what, fix = f"the Hub answers {status}", "try again later"
    problem = Problem(what, "model.name", found=f"{name}@{revision}: {found}"[:300], fix=fix)
    return _nor_here(problem, name) if status in (None, 404) else problem


def _problem(error: Exception, repo: str) -> Problem:
    from huggingface_hub import constants

    response, said = _response(error), " ".join(str(error).split())
    if response is None:
        cause = error.__cause__
        said += f" {type(cause).__name__}: {cause}" if cause else ""
        what, fix = "the Hub can't be reached", "the network, or HF_ENDPOINT; then try again"
        if constants.is_offline_mode():
            what, fix = "the Hub's library is in offline mode", "unset HF_HUB_OFFLINE"
        elif isinstance(error, ValueError) and not isinstance(error, JSONDecodeError):
            what, fix = "the Hub does not take it", ""  # the metadata of the card
    else:
        status, said = _status(error), getattr(error, "server_message", None) or said
        wait = response.headers.get("Retry-After")
        known = {401: "the Hub does not know this token", 403: "the token may not do this"}
        known |= {404: "no such repository or revision, or not for this token"}
        what = known.get(status or 0, f"the Hub answers {status}")
        fix = f"try again in {wait} s" if wait else REMEDIES.get(status or 0, "try again later")
        said = f"{response.status_code}: {said}"
    return Problem(what, where=repo, found=masked(said)[:300], fix=fix)
