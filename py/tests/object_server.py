"""A server of objects on the loopback address, for tests: ranges, ETags, `If-Match`, and faults. It counts what it sends.

Its answers to GET and HEAD are those of an HTTP server, and of S3 with the bucket in the path. It lists as S3 does.
"""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
from collections import Counter
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape


class ObjectServer:
    """Serves `objects`, by path without the leading slash, until it is closed."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        # Of this content.
        self._etags: dict[str, tuple[bytes, str]] = {}
        # Answers by path that replace the usual ones: a status.
        self.statuses: dict[str, int] = {}
        # Requests for these wait until the event is set.
        self.held: dict[str, threading.Event] = {}
        # Requests after this many wait until `released` is set.
        self.hold_after: int | None = None
        self.released = threading.Event()
        self._count = 0
        # Of clients, whose requests wait.
        self._held_ports: list[int] = []
        # Without ETags.
        self.unversioned = False
        self.headers: list[dict[str, str]] = []
        # By path: first and last byte of each answer with bytes.
        self.sent: dict[str, list[tuple[int, int]]] = {}
        self._lock = threading.Lock()
        server = self

        class Handler(_Handler):
            owner = server

        self._http = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def put(self, path: str, content: bytes) -> str:
        """Its URL."""
        self.objects[path] = content
        return f"{self.endpoint}/{path}"

    def etag(self, path: str) -> str:
        content = self.objects[path]
        known = self._etags.get(path)
        if known is None or known[0] is not content:
            known = self._etags[path] = content, f'"{hashlib.md5(content).hexdigest()}"'
        return known[1]

    def wait(self, path: str, port: int = 0) -> bool:
        """Whether a request, of a client's port, is to be answered."""
        with self._lock:
            self._count += 1
            is_late = self.hold_after is not None and self._count > self.hold_after
        event = self.held.get(path)
        if is_late:
            with self._lock:
                self._held_ports.append(port)
        try:
            return (event is None or event.wait(60)) and (not is_late or self.released.wait(60))
        finally:
            if is_late:
                with self._lock:
                    self._held_ports.remove(port)

    def held_ports(self) -> list[int]:
        with self._lock:
            return list(self._held_ports)

    def hold(self, after: int) -> None:
        """Lets so many requests pass, and holds those that come then until `released` is set."""
        with self._lock:
            self.released.clear()
            self._count, self.hold_after = 0, after

    @property
    def is_holding(self) -> bool:
        with self._lock:
            return self.hold_after is not None and self._count > self.hold_after

    def note(self, headers: dict[str, str], path: str, first: int, last: int) -> None:
        with self._lock:
            self.headers.append(headers)
            self.sent.setdefault(path, []).append((first, last))

    def requests(self, path: str) -> int:
        with self._lock:
            return len(self.sent.get(path, []))

    def sent_bytes(self, path: str) -> int:
        with self._lock:
            return sum(last + 1 - first for first, last in self.sent.get(path, []))

    def most_sent(self, path: str, block_bytes: int) -> int:
        """How often the block was sent that was sent most often, of those that an answer had whole."""
        counts: Counter[int] = Counter()
        with self._lock:
            length = len(self.objects[path])
            for first, last in self.sent.get(path, []):
                end = (last + 1) // block_bytes if last + 1 < length else -(-length // block_bytes)
                counts.update(range(-(-first // block_bytes), end))
        return max(counts.values(), default=0)

    def forget(self) -> None:
        with self._lock:
            self.sent.clear()
            self.headers.clear()

    def close(self) -> None:
        for event in [*self.held.values(), self.released]:
            event.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that has given up.
        pass


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: ObjectServer
    protocol_version = "HTTP/1.1"
    # Headers and body are two small writes, of which the second would wait for an acknowledgment.
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        server, path = self.owner, unquote(self.path.lstrip("/").split("?")[0])
        if not server.wait(path, self.client_address[1]):
            return
        query = parse_qs(self.path.partition("?")[2])
        if "list-type" in query:
            return self._list(path.strip("/"), query)
        content = server.objects.get(path)
        status = server.statuses.get(path, 404 if content is None else 200)
        if status != 200 or content is None:
            return self._refuse(status)
        etag = server.etag(path)
        wanted = self.headers.get("If-Match")
        if wanted is not None and wanted != etag and not server.unversioned:
            return self._refuse(412)
        first, last = 0, len(content) - 1
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is not None:
            first, last = int(found[1]), min(int(found[2] or last), last)
            if first > last:
                return self._refuse(416)
        if with_body:
            # Before the client has anything of it: a test counts afterwards.
            server.note({name.lower(): value for name, value in self.headers.items()}, path, first, last)
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        if not server.unversioned:
            self.send_header("ETag", etag)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if with_body:
            self.wfile.write(content[first : last + 1])

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        found, folders = [], set()
        for path, content in sorted(self.owner.objects.items()):
            of_bucket, key = path.split("/", 1)
            if of_bucket != bucket or not key.startswith(prefix):
                continue
            folder, has_more, _ = key[len(prefix) :].partition(delimiter or "\0")
            if has_more:
                folders.add(prefix + folder + delimiter)
                continue
            found.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size><ETag>{escape(self.owner.etag(path))}</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            )
        found += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        count = f"<KeyCount>{len(found)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
        body = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>{count}{''.join(found)}</ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass
