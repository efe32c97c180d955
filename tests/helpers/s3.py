"""An S3 server on this machine, behind a proxy that counts requests and makes them slow or fail."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SECRET = "aVerySecretKey0123456789"
BUCKET = "bucket"


@contextmanager
def nobody() -> Iterator[str]:
    """A URL where connections are refused: its port is taken by this process for as long as the block lasts."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{one.getsockname()[1]}"


class S3:
    """The server as clients see it. fetched, put: how often each key was given, or taken; delay: seconds before an answer;

    fails_every: every so manieth request is answered by an error, 0 for none; failed: how many were; denies: all are refused
    as those of somebody unknown; bytes: given.
    """

    def __init__(self, server_port: int) -> None:
        self.fetched: Counter[str] = Counter()
        self.put: Counter[str] = Counter()
        self.delay, self.fails_every, self.bytes, self.n = 0.0, 0, 0, 0
        self.failed, self.denies = 0, False
        self.lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                time.sleep(proxy.delay)
                with proxy.lock:
                    proxy.n += 1
                    fails = proxy.fails_every and proxy.n % proxy.fails_every == 0
                    proxy.failed += bool(fails)
                if fails or proxy.denies:
                    self.send_response(403 if proxy.denies else 503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
                server = http.client.HTTPConnection("127.0.0.1", server_port, timeout=60)
                server.request(self.command, self.path, body, headers)
                got = server.getresponse()
                content = got.read()
                server.close()
                self.send_response(got.status)
                for name, value in got.getheaders():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                        self.send_header(name, value)
                length = got.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if self.command == "GET" and got.status in (200, 206):
                    with proxy.lock:
                        proxy.fetched[self.path.partition("?")[0]] += 1
                        proxy.bytes += len(content)
                if self.command == "PUT":
                    proxy.put[self.path.partition("?")[0]] += 1
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:  # a client that was killed
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def reset(self) -> None:
        self.fetched.clear()
        self.delay, self.fails_every, self.bytes, self.failed = 0.0, 0, 0, 0
        self.denies = False

    def chunks(self) -> dict[str, int]:
        """How often each chunk was given."""
        return {key: n for key, n in self.fetched.items() if "/c/" in key}


@contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """A server with an empty bucket, for as long as the block lasts. The environment of this process leads to it."""
    said = folder / "moto.log"
    with said.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stdout=log, stderr=log
        )
    before = dict(os.environ)
    try:
        end = time.monotonic() + 100
        while not (listens := re.search(r"Running on http://127.0.0.1:(\d+)", said.read_text())):
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < end, "the S3 server does not begin"
            time.sleep(0.05)
        port = int(listens[1])  # the server's own choice: one chosen before could be another's by now
        s3 = S3(port)
        thread = threading.Thread(target=s3.server.serve_forever, daemon=True)
        thread.start()
        os.environ.update(aws(s3.url))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(
            "PUT", f"/{BUCKET}", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=a/b/us-east-1/s3/aws4_request"}
        )
        assert connection.getresponse().status == 200
        connection.close()
        try:
            yield s3
        finally:
            s3.server.shutdown()
            s3.server.server_close()
    finally:
        os.environ.clear()
        os.environ.update(before)
        process.kill()
        process.wait(30)


def aws(url: str) -> dict[str, str]:
    """An environment that leads to a server."""
    s3fs = {"config_kwargs": {"connect_timeout": 2, "retries": {"max_attempts": 1}}}
    return {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "FSSPEC_S3": json.dumps(s3fs),
    }  # fmt: skip


def upload(folder: Path, name: str) -> str:
    """Put the files of a folder into the bucket, as any tool does; returns the URL."""
    import fsspec

    fs = fsspec.filesystem("s3")
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            fs.put_file(str(file), f"{BUCKET}/{name}/{file.relative_to(folder)}")
    return f"s3://{BUCKET}/{name}"
