"""A small server that speaks as much of the hub's protocol as its own library needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """repos: id -> file name -> content. What is asked for is kept in `asked`."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)  # id -> status, error code
    gated: bool = False  # then files are listed, but not given
    cut_after: int | None = None  # bytes of a file before the connection ends
    listed_commit: str = COMMIT
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def add(self, repo: str, folder: Path) -> None:
        self.repos[repo] = {
            str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
        }


class _Answers(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append(f"{self.command} {path}")
        words = path.removeprefix("api/models/").split("/")
        repo, rest = "/".join(words[:2]), words[2:]
        if repo in self.hub.refused:
            self._refuse(*self.hub.refused[repo])
        elif repo not in self.hub.repos:
            self._refuse(404, "RepoNotFound")
        elif rest[1:2] and rest[1] not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif path.startswith("api/models/"):
            self._send(self._listing(repo), {"Content-Type": "application/json"}, body)
        elif self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif "/".join(rest[2:]) not in self.hub.repos[repo]:
            self._refuse(404, "EntryNotFound")
        else:
            content = self.hub.repos[repo]["/".join(rest[2:])]
            headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
            self._send(content, headers, body, self.hub.cut_after)

    def _listing(self, repo: str) -> bytes:
        files = [
            {"rfilename": name, "size": len(content), "blobId": _digest(content)}
            for name, content in self.hub.repos[repo].items()
        ]
        return json.dumps({"id": repo, "sha": self.hub.listed_commit, "siblings": files}).encode()

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(
        self, content: bytes, headers: dict[str, str], body: bool, cut: int | None = None
    ) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content[:cut])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    handler = type("Answers", (_Answers,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
