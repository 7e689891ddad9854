"""A Hub on localhost with the endpoints that huggingface_hub calls over HTTP. Repositories are in memory.

    with serve() as hub:
        hub.fail("commit", 500, times=2)

It stores each request, so that tests see the uploaded content.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_" + "Canary" * 6  # of `me`, who may write
WRITER = {"auth": {"accessToken": {"role": "write"}}}
DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")
LICENSES = {"other", "apache-2.0", "mit", "llama3.1"}


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    """Summary of each commit."""

    def commit(self, branch: str, files: dict[str, bytes], summary: str) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {summary} {sorted(files)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.log.append(summary)
        return sha

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.branches["main"]]


@dataclass
class Hub:
    endpoint: str = ""
    users: dict[str, dict[str, Any]] = field(default_factory=lambda: {TOKEN: {"name": "me", **WRITER}})
    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """sha256 -> content of what was sent by LFS."""
    requests: list[str] = field(default_factory=list)
    """`POST /api/...` of each request, in order."""
    bodies: list[bytes] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, *, private: bool = True, **files: bytes) -> Repo:
        repo = self.repos[name] = Repo(private)
        repo.commit("main", {".gitattributes": b"", **files}, "initial commit")
        return repo

    def fail(self, where: str, answer: int | str | bytes, times: int = 1, **headers: str) -> None:
        """The next `times` requests whose line has `where` in it get a status, or `cut`, `cut after`
        the deed, or `silence`, or bytes with the status 200."""
        self.faults.append({"where": where, "answer": answer, "left": times, "headers": headers})

    def asked(self, part: str) -> int:
        """How many requests had `part` in their line."""
        return sum(part in line for line in self.requests)


class Cut(Exception):
    """The connection ends here, with no answer."""


class Answer(Exception):
    def __init__(self, status: int, body: Any = b"", **headers: str) -> None:
        self.status, self.headers = status, headers
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


def error(status: int, said: str, code: str = "") -> Answer:
    return Answer(status, {"error": said}, **({"X-Error-Code": code} if code else {}))


ROUTES = (  # method, path -> name of the Handler's method
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("GET", r"/api/(?:models|datasets)/([^/]+/[^/]+)", "info"),
    ("GET", r"/api/(?:models|datasets)/([^/]+/[^/]+)/revision/([^/]+)", "info"),
    ("POST", r"/api/datasets/([^/]+/[^/]+)/paths-info/([^/]+)", "paths"),
    ("GET", r"/api/models/([^/]+/[^/]+)/auth-check/write", "may_write"),
    ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", "tree"),
    ("GET", r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", "folder"),
    ("POST", r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", "branch"),
    ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", "preupload"),
    ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", "commit"),
    ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/store/([0-9a-f]+)", "put"),
    ("POST", r"/verify/([^/]+/[^/]+)", "verify"),
    ("HEAD", r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
    ("GET", r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one(self) -> None:
        line = f"{self.command} {unquote(urlsplit(self.path).path)}"
        self.hub.requests.append(line)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self.chunks()
        self.hub.bodies.append(body)
        fault = next((f for f in self.hub.faults if f["where"] in line and f["left"]), None)
        try:
            if fault:
                fault["left"] -= 1
                if fault["answer"] == "silence":
                    time.sleep(1)
                if fault["answer"] in ("cut", "silence"):
                    raise Cut
                if isinstance(fault["answer"], bytes):
                    raise Answer(200, fault["answer"], **fault["headers"])
                if isinstance(fault["answer"], int):
                    said = f"told to say {fault['answer']} to {self.headers.get('Authorization')}"
                    raise Answer(fault["answer"], {"error": said}, **fault["headers"])
            self.route(line.partition(" ")[2], body)
        except Cut:
            self.close_connection = True
        except Answer as answer:
            if fault and fault["answer"] == "cut after" and answer.status < 300:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

    do_GET = do_POST = do_PUT = do_HEAD = handle_one

    def chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def route(self, path: str, body: bytes) -> None:
        for method, pattern, name in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method == self.command:
                getattr(self, name)(*match.groups(), **({"body": body} if method in ("POST", "PUT") else {}))
        raise error(404, f"no such endpoint: {self.command} {path}")

    def user(self) -> dict[str, Any] | None:
        return self.hub.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def repo(self, name: str, *, write: bool = False) -> Repo:
        """A repository that this token may see, and write to."""
        user, repo = self.user(), self.hub.repos.get(name)
        if self.headers.get("Authorization") and user is None:
            raise Answer(401, {"error": "Invalid credentials"}, **{"X-Error-Message": "Invalid credentials"})
        mine = user is not None and name.partition("/")[0] in (user["name"], *user.get("orgs", ()))
        if repo is None or (repo.private and not mine):
            raise error(404, "Repository not found", "RepoNotFound")
        if write and not (mine and user and user["auth"]["accessToken"]["role"] != "read"):
            raise error(403, f"you may not write to {name}")
        return repo

    def sha(self, repo: Repo, revision: str) -> str:
        found = repo.at(revision)
        if found is None:
            raise error(404, "Invalid rev id", "RevisionNotFound")
        return found

    def whoami(self) -> None:
        user = self.user()
        raise Answer(200, user) if user else error(401, "Invalid username or password.")

    def create(self, *, body: bytes) -> None:
        user, asked = self.user(), json.loads(body)
        owner = asked.get("organization") or (user or {}).get("name")
        if user is None:
            raise error(401, "Invalid username or password.")
        if owner not in (user["name"], *user.get("orgs", ())):
            raise error(403, f"you may not create repositories of {owner}")
        name = f"{owner}/{asked['name']}"
        if name in self.hub.repos:
            raise error(409, "You already created this model repo")
        self.hub.add(name, private=asked.get("visibility") == "private")
        raise Answer(200, {"url": f"{self.hub.endpoint}/{name}", "name": name})

    def validate(self, *, body: bytes) -> None:
        """Check a card's metadata as the Hub does, as far as this is documented."""
        text = json.loads(body)["content"]
        data = yaml.safe_load(text.split("---")[1])
        wrong = [] if data.get("license") in LICENSES else ["license must be one of the licenses of the Hub"]
        wrong += [f"no data set: {name}" for name in data.get("datasets", []) if not DATASET.fullmatch(name)]
        for result in (data.get("model-index") or [{"results": []}])[0]["results"]:
            if not (result["task"]["type"] and result["dataset"]["name"] and result["dataset"]["type"]):
                wrong.append("model-index")
            wrong += ["value"] * any(not isinstance(metric["value"], float) for metric in result["metrics"])
        raise Answer(400 if wrong else 200, {"errors": [{"message": w} for w in wrong], "warnings": []})

    def info(self, name: str, revision: str = "main") -> None:
        repo = self.repo(name)
        sha = self.sha(repo, revision)
        files = [{"rfilename": path} for path in repo.commits[sha]]
        raise Answer(200, {"id": name, "sha": sha, "private": repo.private, "siblings": files})

    def may_write(self, name: str) -> None:
        self.repo(name, write=True)
        raise Answer(200, {})

    def branch(self, name: str, branch: str, *, body: bytes) -> None:
        repo = self.repo(name, write=True)
        if branch in repo.branches:
            raise error(409, "Reference already exists")
        repo.branches[branch] = repo.branches["main"]
        raise Answer(200, {})

    def entry(self, path: str, content: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
        if path.endswith(".safetensors"):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 132}
        return entry

    def tree(self, name: str, revision: str) -> None:
        repo = self.repo(name)
        raise Answer(200, [self.entry(*file) for file in repo.commits[self.sha(repo, revision)].items()])

    def folder(self, name: str, revision: str, folder: str | None) -> None:
        """The files in one folder of a dataset, and the folders in it."""
        repo = self.repo(name)
        files, start = repo.commits[self.sha(repo, revision)], f"{folder}/" if folder else ""
        below = {path.removeprefix(start): path for path in files if path.startswith(start)}
        if not below:
            raise error(404, "no such folder", "EntryNotFound")
        recursive = "recursive=true" in self.path.lower()
        found = [
            self.entry(path, files[path]) for rest, path in below.items() if recursive or "/" not in rest
        ]
        folders = dict.fromkeys(rest.partition("/")[0] for rest in below if "/" in rest)
        oid = "0" * 40
        listed = [{"type": "directory", "path": f"{start}{one}", "oid": oid, "size": 0} for one in folders]
        raise Answer(200, [*listed, *found])

    def paths(self, name: str, revision: str, *, body: bytes) -> None:
        repo = self.repo(name)
        files = repo.commits[self.sha(repo, revision)]
        asked = parse_qs(body.decode()).get("paths", []) or json.loads(body or b"{}").get("paths", [])
        raise Answer(200, [self.entry(path, files[path]) for path in asked if path in files])

    def preupload(self, name: str, revision: str, *, body: bytes) -> None:
        repo = self.repo(name, write=True)
        there, found = repo.commits[self.sha(repo, revision)], []
        for file in json.loads(body)["files"]:
            path, large = file["path"], file["path"].endswith(".safetensors")
            oid = None
            if path in there:
                oid = hashlib.sha256(there[path]).hexdigest() if large else blob_id(there[path])
            mode = "lfs" if large else "regular"
            found.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        raise Answer(200, {"files": found})

    def batch(self, name: str, *, body: bytes) -> None:
        self.repo(name, write=True)
        found = []
        for item in json.loads(body)["objects"]:
            if item["oid"] not in self.hub.large:
                upload = {"href": f"{self.hub.endpoint}/store/{item['oid']}"}
                verify = {"href": f"{self.hub.endpoint}/verify/{name}"}
                item = {**item, "actions": {"upload": upload, "verify": verify}}
            found.append(item)
        raise Answer(200, {"objects": found, "transfer": "basic"})

    def put(self, oid: str, *, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise error(400, "the content does not fit its hash")
        self.hub.large[oid] = body
        raise Answer(200)

    def verify(self, name: str, *, body: bytes) -> None:
        asked = json.loads(body)
        ok = len(self.hub.large.get(asked["oid"], b"")) == asked["size"]
        raise Answer(200, {}) if ok else error(404, "nothing was uploaded")

    def commit(self, name: str, branch: str, *, body: bytes) -> None:
        repo, files, summary = self.repo(name, write=True), None, ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                head, summary = self.sha(repo, branch), value["summary"]
                if value.get("parentCommit", head) != head:
                    raise error(412, "A commit has happened since. Please refresh and try again.")
                files = dict(repo.commits[head])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        sha = repo.commit(branch, files or {}, summary)
        raise Answer(200, {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}", "commitOid": sha})

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name)
        sha = self.sha(repo, revision)
        content = repo.commits[sha].get(path)
        if content is None:
            raise Answer(404, b"", **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        digest = self.entry(path, content).get("lfs", {}).get("oid") or blob_id(content)
        raise Answer(200, content, **{"X-Repo-Commit": sha, "ETag": f'"{digest}"'})


@contextlib.contextmanager
def serve() -> Any:
    hub = Hub()
    handler = type("HandlerOfOne", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
