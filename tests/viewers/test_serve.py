"""Byte ranges and headers as viewers ask for them."""

from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.viewers.serve import serve

DATA = bytes(range(100))


@pytest.fixture
def ask(tmp_path):
    (tmp_path / "a.bin").write_bytes(DATA)
    (tmp_path / "empty").touch()
    with serve(tmp_path) as address:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)

        def ask(method: str, path: str, wanted: str = "") -> tuple[int, dict[str, str], bytes]:
            connection.request(method, path, headers={"Range": wanted} if wanted else {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

        yield ask
        connection.close()


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        ("0-0", slice(0, 1)),
        ("7-41", slice(7, 42)),
        ("90-", slice(90, 100)),
        ("-3", slice(97, 100)),
        ("95-999", slice(95, 100)),
        ("-999", slice(0, 100)),
    ],
)
def test_a_range(ask, wanted, part):
    status, headers, body = ask("GET", "/a.bin", f"bytes={wanted}")
    assert (status, body) == (206, DATA[part])
    assert headers["Content-Range"] == f"bytes {part.start}-{part.stop - 1}/100"
    assert headers["Content-Length"] == str(len(body))
    status, only, body = ask("HEAD", "/a.bin", f"bytes={wanted}")
    assert (status, only["Content-Range"], body) == (206, headers["Content-Range"], b"")


@pytest.mark.parametrize(
    ("path", "wanted"), [("/a.bin", "100-"), ("/a.bin", "9-8"), ("/a.bin", "-0"), ("/empty", "0-0")]
)
def test_a_range_beyond_the_file(ask, path, wanted):
    status, headers, body = ask("GET", path, f"bytes={wanted}")
    assert (status, body) == (416, b"")
    assert headers["Content-Range"] == f"bytes */{100 if path == '/a.bin' else 0}"


@pytest.mark.parametrize("wanted", ["", "bytes=-", "bytes=0-1,5-6", "lines=1-2"])
def test_the_whole_file(ask, wanted):
    status, headers, body = ask("GET", "/a.bin", wanted)
    assert (status, body) == (200, DATA)
    assert headers["Accept-Ranges"] == "bytes"


def test_head_tells_the_size(ask):
    status, headers, body = ask("HEAD", "/a.bin")
    assert (status, headers["Content-Length"], body) == (200, "100", b"")


@pytest.mark.parametrize("path", ["/b.bin", "/../a.bin/b", "/%2e%2e/%2e%2e/etc/passwd"])
@pytest.mark.parametrize("wanted", ["", "bytes=0-1"])
def test_what_is_not_there(ask, path, wanted):
    status, headers, _ = ask("GET", path, wanted)
    assert status == 404
    assert headers["Access-Control-Allow-Origin"] == "*"


def test_pages_of_another_origin_may_ask(ask):
    status, headers, body = ask("OPTIONS", "/a.bin")
    assert (status, body) == (204, b"")
    assert headers["Access-Control-Allow-Headers"] == "Range"
    for status, headers, _ in (
        ask("GET", "/a.bin"),
        ask("GET", "/a.bin", "bytes=0-1"),
        ask("GET", "/a.bin", "bytes=100-"),
    ):
        assert headers["Access-Control-Allow-Origin"] == "*", status
        assert "Content-Range" in headers["Access-Control-Expose-Headers"]


def test_nothing_is_left_of_a_server(tmp_path):
    with serve(Path(tmp_path)) as address:
        port = urlsplit(address).port
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection("127.0.0.1", port, timeout=5).connect()
