"""A model hub of one repository, on loopback, speaking what huggingface_hub asks of the real one."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "c0ffee" * 6 + "c0ff"


class _Handler(BaseHTTPRequestHandler):
    files: dict[str, bytes]
    refusal: str | None
    asked: list[str]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ("/api/models/owner/name/revision/main", "/api/models/owner/name/revision/v1"):
            if self.refusal:
                self._send(b"", status=403 if self.refusal == "GatedRepo" else 404, code=self.refusal)
            else:
                self._send(json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/owner/name/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
                for name, content in self.files.items()
            ]
            self._send(json.dumps(tree).encode())
        elif path.startswith(f"/owner/name/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/owner/name/resolve/{COMMIT}/")
            self.asked.append(name)
            self._send(self.files[name])
        else:
            self._send(b"{}", status=404)

    do_HEAD = do_GET  # noqa: N815

    def _send(self, body: bytes, status: int = 200, code: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{_oid(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Stay quiet."""


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve_hub(folder: Path, refusal: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of `folder` as the model owner/name; yields the endpoint and the names downloaded.

    `refusal` answers every request for the model with that error code of the hub instead.
    """
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    asked: list[str] = []
    handler = type("Handler", (_Handler,), {"files": files, "refusal": refusal, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
