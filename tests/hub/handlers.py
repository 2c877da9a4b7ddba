"""The answers of the hub on loopback, path by path."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from typing import Any

import tornado.iostream
import tornado.web
import yaml

from tests.hub.server import LFS_BYTES, Fault, Hub, Repo, Request

_CHUNK = 256 << 10


class _Handler(tornado.web.RequestHandler):
    def initialize(self, hub: Hub) -> None:
        self.hub = hub
        self.fault: Fault | None = None

    async def prepare(self) -> None:
        self.entry = Request(self.request.method or "", self.request.path, self._range(), self._authorized())
        self.hub.log.append(self.entry)
        self.hub.under_way += 1
        self.hub.most = max(self.hub.most, self.hub.under_way)
        for fault in self.hub.faults:
            if fault.times > 0 and fault.match in self.request.path and fault.method in (None, self.request.method):
                fault.times -= 1
                self.fault = fault
                break
        await asyncio.sleep(self.hub.latency + (self.fault.slow if self.fault else 0))
        if self.fault is not None and self.fault.status is not None:
            self.set_status(self.fault.status)
            for name, value in self.fault.headers.items():
                self.set_header(name, value)
            self.finish()

    def on_finish(self) -> None:
        self.hub.under_way -= 1

    def _authorized(self) -> bool:
        return "Authorization" in self.request.headers

    def _range(self) -> tuple[int, int] | None:
        value = self.request.headers.get("Range", "")
        if not value.startswith("bytes="):
            return None
        first, _, last = value.removeprefix("bytes=").partition("-")
        return int(first), int(last) + 1 if last else 1 << 60

    def refuse(self, status: int, code: str, message: str = "") -> None:
        self.set_status(status)
        self.set_header("X-Error-Code", code)
        self.set_header("X-Error-Message", message or code)
        self.finish({"error": message or code})

    def repo(self, name: str, revision: str | None = None, *, write: bool = False) -> Repo | None:
        """The repository, if who asks may see it; else the answer has been given."""
        found = self.hub.repos.get(name)
        token = self.request.headers.get("Authorization", "").removeprefix("Bearer ")
        if found is None or (found.private and token != found.token):
            self.refuse(404 if token == "hf_good" else 401, "RepoNotFound", "Repository not found")
            return None
        if write and token != found.token:
            self.refuse(403, "", "no write access")
            return None
        if revision is not None and revision not in ("main", found.sha(), *found.tags):
            self.refuse(404, "RevisionNotFound", "Invalid rev id")
            return None
        return found

    def gate(self, repo: Repo) -> bool:
        if repo.gated and self.request.headers.get("Authorization", "") != f"Bearer {repo.token}":
            self.refuse(403 if self._authorized() else 401, "GatedRepo", "Access to model is restricted.")
            return True
        return False

    def answer(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.entry.sent = len(text)
        self.set_header("Content-Type", "application/json")
        self.finish(text)

    async def send(self, data: bytes, tag: str) -> None:
        """A file, or a range of it."""
        fault = self.fault
        if fault is not None and fault.flip is not None:
            data = data[: fault.flip] + bytes([data[fault.flip] ^ 1]) + data[fault.flip + 1 :]
        total = fault.total if fault is not None and fault.total is not None else len(data)
        self.set_header("ETag", fault.tag if fault is not None and fault.tag else f'"{tag}"')
        self.set_header("Accept-Ranges", "bytes")
        first, last = 0, len(data)
        span = self._range()
        if span is not None and not (fault is not None and fault.whole):
            first, last = span[0], min(span[1], len(data))
            if first >= len(data):
                self.set_status(416)
                self.finish()
                return
            self.set_status(206)
            self.set_header("Content-Range", f"bytes {first}-{last - 1}/{total}")
            self.set_header("Content-Length", str(last - first))
        else:
            self.set_header("Content-Length", str(total))
        if self.request.method == "HEAD":
            self.finish()
            return
        body = memoryview(data)[first:last]
        stop = len(body) if fault is None or fault.cut is None else min(fault.cut, len(body))
        for at in range(0, stop, _CHUNK):
            part = body[at : min(at + _CHUNK, stop)]
            self.write(bytes(part))
            try:
                await self.flush()
            except tornado.iostream.StreamClosedError:  # whoever asked has enough
                return
            self.entry.sent += len(part)
            if self.hub.rate:
                await asyncio.sleep(len(part) / self.hub.rate)
        if stop < len(body) or total > len(data):
            if self._status_code == 200 and not stop:
                await self.flush()
            self.request.connection.stream.close()  # type: ignore[union-attr]
            return
        self.finish()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Info(_Handler):
    def get(self, name: str, revision: str | None = None) -> None:
        repo = self.repo(name, revision)
        if repo is not None:
            siblings = [{"rfilename": p} for p in repo.files]
            self.answer({"id": name, "sha": repo.sha(), "private": repo.private, "tags": [], "siblings": siblings})


class _Tree(_Handler):
    def get(self, name: str, revision: str, inside: str | None = None) -> None:
        repo = self.repo(name, revision)
        if repo is None or self.gate(repo):
            return
        out: list[dict[str, Any]] = []
        for path, data in sorted(repo.files.items()):
            item: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _git(data)}
            if len(data) >= LFS_BYTES and not path.endswith((".json", ".md")):
                item["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 134}
            out.append(item)
        out += [
            {"type": "directory", "path": folder, "size": 0, "oid": "0" * 40}
            for folder in sorted({p.rpartition("/")[0] for p in repo.files if "/" in p})
        ]
        self.answer(out)


class _Search(_Handler):
    def get(self) -> None:
        wanted, author = self.get_argument("search", "").lower(), self.get_argument("author", "")
        found = [n for n, r in self.hub.repos.items() if wanted in n.lower() and n.startswith(author) and not r.private]
        self.answer([{"id": n, "sha": self.hub.repos[n].sha(), "tags": []} for n in found])


class _Resolve(_Handler):
    async def _get(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name, revision)
        if repo is None or self.gate(repo):
            return
        data = repo.files.get(path)
        self.set_header("X-Repo-Commit", repo.sha())
        if data is None:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        if len(data) < LFS_BYTES or path.endswith((".json", ".md")):
            await self.send(data, _git(data))
            return
        sha = _sha256(data)
        self.set_header("X-Linked-Etag", f'"{sha}"')
        self.set_header("X-Linked-Size", str(len(data)))
        self.set_header("Location", f"{self.hub.cdn}/cdn/{name}/{sha}?path={path}")
        self.set_status(302)
        self.finish()

    get = head = _get


class _Cdn(_Handler):
    async def get(self, name: str, sha: str) -> None:
        data = self.hub.repos[name].files[self.get_argument("path")]
        await self.send(data, sha)


class _Create(_Handler):
    def post(self) -> None:
        body = json.loads(self.request.body)
        name = f"{body['organization']}/{body['name']}" if body.get("organization") else body["name"]
        if self.request.headers.get("Authorization") != "Bearer hf_good":
            self.refuse(401, "", "Invalid credentials in Authorization header")
            return
        if name in self.hub.repos:
            self.set_status(409)
            self.finish({"url": f"{self.hub.url}/{name}", "error": "You already created this model repo"})
            return
        private = body.get("private") is True or body.get("visibility") == "private"
        self.hub.repos[name] = Repo({}, private=private)
        self.answer({"url": f"{self.hub.url}/{name}", "id": name})


class _Yaml(_Handler):
    def post(self) -> None:
        text = json.loads(self.request.body)["content"].split("---\n")
        good = len(text) > 2 and isinstance(yaml.safe_load(text[1]), dict)
        self.answer({"errors": [] if good else [{"message": "no front matter"}], "warnings": []})


class _Preupload(_Handler):
    def post(self, name: str, revision: str) -> None:
        if self.repo(name, write=True) is None:
            return
        files = json.loads(self.request.body)["files"]
        lfs = {f["path"]: f["size"] >= LFS_BYTES and not f["path"].endswith((".json", ".md")) for f in files}
        out = [{"path": p, "uploadMode": "lfs" if big else "regular", "shouldIgnore": False} for p, big in lfs.items()]
        repo = self.hub.repos[name]
        for item in out:
            data = repo.files.get(item["path"])
            item["oid"] = (_sha256(data) if item["uploadMode"] == "lfs" else _git(data)) if data is not None else None
        self.answer({"files": out})


class _Batch(_Handler):
    def post(self, name: str) -> None:
        if self.repo(name, write=True) is None:
            return
        out = []
        for item in json.loads(self.request.body)["objects"]:
            actions = {"upload": {"href": f"{self.hub.url}/upload/{item['oid']}", "header": {}}}
            out.append(item | ({} if item["oid"] in self.hub.uploads else {"actions": actions}))
        self.answer({"transfer": "basic", "objects": out})


class _Upload(_Handler):
    def put(self, sha: str) -> None:
        if _sha256(self.request.body) != sha:
            self.refuse(422, "", "wrong hash")
            return
        self.hub.uploads[sha] = self.request.body
        self.finish()


class _Commit(_Handler):
    def post(self, name: str, revision: str) -> None:
        repo = self.repo(name, write=True)
        if repo is None:
            return
        for line in self.request.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                repo.files[value["path"]] = self.hub.uploads[value["oid"]]
        repo.commits += 1
        self.answer({"commitUrl": f"{self.hub.url}/{name}/commit/{repo.sha()}", "commitOid": repo.sha()})


_NAME = r"([^/]+/[^/]+)"
ROUTES: list[tuple[str, Any]] = [
    (r"/api/models", _Search),
    (r"/api/validate-yaml", _Yaml),
    (r"/api/repos/create", _Create),
    (rf"/api/models/{_NAME}/tree/([^/]+)(?:/(.+))?", _Tree),
    (rf"/api/models/{_NAME}/preupload/([^/]+)", _Preupload),
    (rf"/api/models/{_NAME}/commit/([^/]+)", _Commit),
    (rf"/api/models/{_NAME}/revision/([^/]+)", _Info),
    (rf"/api/models/{_NAME}", _Info),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", _Batch),
    (rf"/{_NAME}/resolve/([^/]+)/(.+)", _Resolve),
    (rf"/cdn/{_NAME}/(.+)", _Cdn),
    (r"/upload/(.+)", _Upload),
]
