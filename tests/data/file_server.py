"""An HTTP server on localhost that can misbehave in the ways that real ones do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer:
    """Serves `files`, as told by the other attributes, and remembers what it was asked.

    Attributes:
        files: Content by path, without the leading slash.
        requests: Path and `Range` header of every request.
        cuts: For the next requests, bytes of the body after which the connection is closed.
        statuses: For the next requests, a status to answer instead of the file.
        headers: Headers to add to every answer.
        use_range: Whether `Range` is understood.
        use_length: Whether `Content-Length` is sent.
        etag: The entity tag, or None.
        gate: Requests wait here before the body is sent.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.headers: dict[str, str] = {}
        self.use_range = True
        self.use_length = True
        self.etag: str | None = '"one"'
        self.gate = threading.Event()
        self.gate.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/{path}"

    @property
    def ranges(self) -> list[str | None]:
        return [range_ for _, range_ in self.requests]

    @contextmanager
    def running(self) -> Iterator[FileServer]:
        self._thread.start()
        try:
            yield self
        finally:
            self.gate.set()
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


def closed_address() -> str:
    """Return an address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/file"


def _handler(server: FileServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            path, range_ = self.path.lstrip("/"), self.headers.get("Range")
            server.requests.append((path, range_))
            if server.statuses:
                return self.reply(server.statuses.pop(0), {"Content-Length": "0"}, b"")
            if path not in server.files:
                return self.reply(404, {"Content-Length": "0"}, b"")
            content = server.files[path]
            headers = {} if server.etag is None else {"ETag": server.etag}
            if_range = self.headers.get("If-Range", server.etag)
            if range_ is None or not server.use_range or if_range != server.etag:
                if server.use_length:
                    headers["Content-Length"] = str(len(content))
                return self.reply(200, headers, content)
            start = int(range_.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                headers |= {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"}
                return self.reply(416, headers, b"")
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            headers["Content-Length"] = str(len(content) - start)
            return self.reply(206, headers, content[start:])

        def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in (headers | server.headers).items():
                self.send_header(name, value)
            self.end_headers()
            server.gate.wait(timeout=10)
            self.wfile.write(body[: server.cuts.pop(0)] if server.cuts and body else body)
            self.close_connection = True

    return Handler
