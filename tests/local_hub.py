"""A Hugging Face hub on this machine: the calls of its API that downloads and `partita push` make."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any


@dataclass
class Hub:
    """Repositories by name. A revision is a branch or a commit."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    has_gate: set[str] = field(default_factory=set)
    read_only: bool = False
    """Uploads get status 401."""
    requests: list[str] = field(default_factory=list)
    changes: dict[str, int] = field(default_factory=dict)
    """Commits of each repository."""

    def add(self, name: str, folder: Path) -> None:
        """A repository with the files of a folder."""
        self.repositories[name] = {
            each.relative_to(folder).as_posix(): each.read_bytes() for each in folder.rglob("*") if each.is_file()
        }
        self.changes[name] = self.changes.get(name, 0) + 1

    def commit(self, name: str) -> str:
        """The last commit of a repository."""
        return hashlib.sha1(f"{name} {self.changes.get(name)}".encode()).hexdigest()


@contextmanager
def local_hub() -> Iterator[Hub]:
    """Serve an empty hub."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._read(body=False)

    def do_GET(self) -> None:
        self._read(body=True)

    def _read(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(path)
        described = re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)
        if described:
            name, kind, revision = described.groups()
            if not self._known(name, revision):
                return
            files = self.hub.repositories[name]
            listed = [{"type": "file", "path": each, "size": len(files[each]), "oid": "0" * 40} for each in files]
            info = {"id": name, "sha": self.hub.commit(name), "siblings": [{"rfilename": each} for each in files]}
            self._json(listed if kind == "tree" else info, body=body)
        elif file:
            name, revision, wanted = file.groups()
            if not self._known(name, revision):
                return
            if name in self.hub.has_gate:
                self._refuse(403, "GatedRepo")
            elif wanted not in self.hub.repositories[name]:
                self._refuse(404, "EntryNotFound")
            else:
                self._bytes(self.hub.repositories[name][wanted], "application/octet-stream", name, body=body)
        else:
            self._refuse(404, "")

    def _known(self, name: str, revision: str | None) -> bool:
        """Whether the hub has the repository at this revision; answers where it has not."""
        if name not in self.hub.repositories:
            self._refuse(401, "RepoNotFound")
        elif revision not in (None, "main", "v1", self.hub.commit(name)):
            self._refuse(404, "RevisionNotFound")
        else:
            return True
        return False

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(self.path)
        changed = re.fullmatch(r"/api/models/(.+?)/(preupload|commit)/main(?:\?.*)?", self.path)
        if self.hub.read_only:
            self._refuse(401, "")
        elif self.path == "/api/repos/create":
            asked = json.loads(data)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            if name in self.hub.repositories:
                self._json({"url": f"{self.hub.url}/{name}"}, status=409)
                return
            self.hub.repositories[name] = {}
            if asked.get("private") or asked.get("visibility") == "private":
                self.hub.private.add(name)
            self._json({"url": f"{self.hub.url}/{name}"})
        elif changed and changed[2] == "preupload":
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(data)["files"]]
            self._json({"files": [{**each, "shouldIgnore": False} for each in files]})
        elif changed:
            self.hub.changes[changed[1]] = self.hub.changes.get(changed[1], 0) + 1
            for line in map(json.loads, data.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.hub.repositories[changed[1]][line["value"]["path"]] = content
            commit = self.hub.commit(changed[1])
            self._json({"commitUrl": f"{self.hub.url}/{changed[1]}/commit/{commit}", "commitOid": commit})
        else:
            self._refuse(404, "")

    def _json(self, value: Any, *, status: int = 200, body: bool = True) -> None:
        self._bytes(json.dumps(value).encode(), "application/json", "", status=status, body=body)

    def _bytes(self, data: bytes, kind: str, name: str, *, status: int = 200, body: bool = True) -> None:
        self.send_response(status)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        if name:
            self.send_header("X-Repo-Commit", self.hub.commit(name))
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code or "refused")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
