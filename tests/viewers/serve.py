"""Serve a folder on this machine the way that viewers in a browser need it: ``python serve.py FOLDER [PORT]``.

Python's own file server lacks both: byte ranges, without which a reader fetches a whole shard for each chunk, and the
headers by which a page of another origin may read the answers.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["StoreHandler", "serve"]

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_HEADERS = {
    "Accept-Ranges": "bytes",
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Headers": "Range",
    "Access-Control-Expose-Headers": "Accept-Ranges, Content-Length, Content-Range",
    "Cache-Control": "no-store",  # an entry may be replaced
}


class StoreHandler(SimpleHTTPRequestHandler):
    """Answers GET, HEAD and OPTIONS; one byte range per request."""

    protocol_version = "HTTP/1.1"  # keeps connections: a volume is hundreds of requests

    def do_OPTIONS(self) -> None:
        """Let a browser ask for ranges."""
        self.send_response(HTTPStatus.NO_CONTENT)
        self.end_headers()

    def send_head(self):
        """Send the headers; return what of the file is wanted."""
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if wanted is None or not any(wanted.groups()) or not path.is_file():
            return super().send_head()
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            first, last = wanted.groups()
            start = int(first) if first else max(0, size - int(last))
            stop = min(size, int(last) + 1) if first and last else size
            if start >= stop:
                self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
            file.seek(start)
            part = file.read(stop - start)
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        return io.BytesIO(part)

    def end_headers(self) -> None:
        """Add what every answer carries."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_args) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[str]:
    """Serve a folder on localhost until the block ends; gives its address."""
    with ThreadingHTTPServer(("127.0.0.1", port), partial(StoreHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    with (
        serve(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8000) as address,
        contextlib.suppress(KeyboardInterrupt),
    ):
        sys.stdout.write(f"{address}, until Ctrl+C\n")
        threading.Event().wait()
