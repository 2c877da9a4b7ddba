"""A hub on loopback: the parts of the Hub's HTTP API that ``huggingface_hub`` uses, with faults on request.

What it answers follows the client's own code and the Hub's documented headers, nothing of ours. Large files are
"LFS": they are answered with a redirect to another host, as the Hub redirects to its CDN.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import tornado.httpserver
import tornado.netutil
import tornado.web

#: Files from this size on are kept as LFS.
LFS_BYTES = 2_000


@dataclass
class Repo:
    """A repository: its files at its one commit."""

    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    token: str = "hf_good"
    tags: tuple[str, ...] = ()
    commits: int = 1

    def sha(self) -> str:
        """The commit."""
        return hashlib.sha1(b"".join(n.encode() + d[:64] for n, d in sorted(self.files.items()))).hexdigest()


@dataclass
class Fault:
    """What goes wrong with requests whose path contains ``match``.

    Attributes:
        match: Part of the path; of the CDN's, too.
        times: How often.
        status: Answer this, with ``headers``.
        cut: Close the connection after so many bytes of the body.
        slow: Wait so many seconds first.
        total: State this as the file's length.
        flip: Change the byte at this offset of the file.
        whole: Pay no attention to ranges.
        tag: The ETag to state.
    """

    match: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    slow: float = 0.0
    total: int | None = None
    flip: int | None = None
    whole: bool = False
    tag: str | None = None
    method: str | None = None


@dataclass
class Request:
    """One request that came."""

    method: str
    path: str
    range: tuple[int, int] | None
    authorized: bool
    sent: int = 0


class Hub:
    """The server, in a thread of its own.

    Args:
        latency: Seconds before every answer.
        rate: Bytes per second and connection that files are sent with; None for as fast as it goes.

    Attributes:
        url: For HF_ENDPOINT.
        cdn: Where large files lie.
        repos: By name.
        faults: What is to go wrong.
        log: All requests.
        most: How many were under way at once, at most.
    """

    def __init__(self, *, latency: float = 0.0, rate: float | None = None) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.log: list[Request] = []
        self.under_way = self.most = 0
        self.uploads: dict[str, bytes] = {}
        self.latency, self.rate = latency, rate
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        def serve() -> None:
            from tests.hub.handlers import ROUTES

            asyncio.set_event_loop(self._loop)
            sockets = tornado.netutil.bind_sockets(0, "127.0.0.1")
            port = sockets[0].getsockname()[1]
            self.url, self.cdn = f"http://127.0.0.1:{port}", f"http://localhost:{port}"  # another host, to a client
            routes = [(pattern, handler, {"hub": self}) for pattern, handler in ROUTES]
            server = tornado.httpserver.HTTPServer(
                tornado.web.Application(routes, log_function=lambda _: None),
                max_body_size=1 << 30,
                max_buffer_size=1 << 30,
            )
            server.add_sockets(sockets)
            self._server = server
            ready.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """Stop."""

        async def stop() -> None:
            self._server.stop()
            await self._server.close_all_connections()
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop)
        self._thread.join(5)

    def find(self, test: Callable[[Request], bool]) -> list[Request]:
        """Requests for which ``test`` holds."""
        return [r for r in self.log if test(r)]

    def ranges_of(self, data: bytes) -> list[tuple[int, int]]:
        """The ranges of a file that went over the wire, as asked for."""
        sha = hashlib.sha256(data).hexdigest()
        return [r.range for r in self.log if sha in r.path and r.range is not None and r.method == "GET"]

    @property
    def sent(self) -> int:
        """Bytes of all bodies."""
        return sum(r.sent for r in self.log)
