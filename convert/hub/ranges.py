"""Byte ranges of a repository's files over HTTP: whole or not at all, continued where they stopped, with patience.

The library supplies the session, the headers (the token) and the addresses; what it has no call for, a range of a
file, is here. Answers are checked to be the range that was asked for, of a file of the size that the tree says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from convert.errors import ConvertError, Problem
from convert.hub.failures import BUSY, explain, is_transport, retry_after
from convert.hub.repository import LONGEST_WAIT, TRIES, RemoteFile, Repository, nearest

#: What a signed address says when its time has come.
_EXPIRED = (400, 401, 403, 404, 410)
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 30.0


class Changed(Exception):
    """The file is not the one that the tree described."""


class Ranges:
    """Reads byte ranges of the files of one repository; used by several threads at once.

    Args:
        repository: Which.

    Attributes:
        requests: How many were sent (redirects count once).
    """

    def __init__(self, repository: Repository) -> None:
        from huggingface_hub.utils import build_hf_headers

        self.repository = repository
        self.requests = 0
        self._headers = build_hf_headers(library_name="ckpt-convert")
        self._places: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of a file.

        Raises:
            ConvertError: They cannot be had, or the file is another one.
        """
        buffer = bytearray(stop - start)
        self.read_into(file, memoryview(buffer), start)
        return bytes(buffer)

    def read_into(
        self, file: RemoteFile, buffer: memoryview, start: int, *, cancel: Callable[[], bool] | None = None
    ) -> None:
        """Fill ``buffer`` from ``start``; a connection that is cut is continued at the byte where it stopped.

        Args:
            file: Of the repository.
            buffer: Filled completely.
            start: Offset in the file.
            cancel: Asked now and then; true gives up, with part of the buffer filled.

        Raises:
            ConvertError: It cannot be had, or the file is another one.
        """
        done = failures = 0
        while done < len(buffer):
            before = done
            wait: float | None = None
            try:
                done = self._some(file, buffer, start, done, cancel)
                if done < len(buffer) and cancel is not None and cancel():
                    return
                error: BaseException | None = None if done > before else OSError("the connection was closed at once")
            except Changed as changed:
                raise self._changed(file, str(changed)) from None
            except _Busy as busy:
                error, wait = busy.error, busy.wait
            except _Cut as cut:
                done, error = cut.done, cut.error
            if done == len(buffer):
                return
            failures = 1 if done > before else failures + 1  # progress is worth new patience
            if failures >= TRIES or (wait or 0) > LONGEST_WAIT:
                if error is None:
                    error = OSError("the connection was cut")
                raise explain(error, self.repository.name, near=lambda: nearest(self.repository.name)) from error
            time.sleep(wait if wait is not None else 0.0 if done > before else 0.25 * 2**failures)

    def _some(
        self, file: RemoteFile, buffer: memoryview, start: int, done: int, cancel: Callable[[], bool] | None
    ) -> int:
        """One request; returns how much of the buffer is filled then."""
        from huggingface_hub.utils import get_session, hf_raise_for_status

        first, last = start + done, start + len(buffer) - 1
        url, headers, known = self._address(file)
        headers |= {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
        with self._lock:
            self.requests += 1
        try:
            with get_session().stream(
                "GET", url, headers=headers, follow_redirects=True, timeout=_timeout()
            ) as response:
                status = response.status_code
                if known and status in _EXPIRED:  # a signed address, whose time is over
                    with self._lock:
                        self._places.pop(file.path, None)
                    return self._some(file, buffer, start, done, cancel)
                if status in BUSY or (status in _EXPIRED and response.history):
                    response.read()
                    raise _Busy(_status_error(response), retry_after(response.headers))
                if status >= 400:
                    response.read()
                    hf_raise_for_status(response)
                skip = self._check(file, response, first)
                with self._lock:
                    if str(response.url) != url and not known:
                        self._places[file.path] = str(response.url)
                for chunk in response.iter_raw():  # as they come: what came before a cut is kept
                    if skip:
                        cut = min(skip, len(chunk))
                        chunk, skip = chunk[cut:], skip - cut
                    part = chunk[: len(buffer) - done]
                    buffer[done : done + len(part)] = part
                    done += len(part)
                    if done == len(buffer) or (cancel is not None and cancel()):
                        break
        except (Changed, _Busy, ConvertError):
            raise
        except Exception as error:
            if is_transport(error):
                raise _Cut(done, error) from error
            raise explain(error, self.repository.name, near=lambda: nearest(self.repository.name)) from error
        return done

    def _address(self, file: RemoteFile) -> tuple[str, dict[str, str], bool]:
        """Where to ask, with which headers, and whether that is what an earlier redirect said."""
        from huggingface_hub import constants, hf_hub_url

        place = self._places.get(file.path)
        if place is not None:
            same = urlsplit(place).netloc == urlsplit(constants.ENDPOINT).netloc
            own = {k: v for k, v in self._headers.items() if same or k.lower() != "authorization"}
            return place, own, True
        url = hf_hub_url(self.repository.name.repo, file.path, revision=self.repository.commit)
        return url, dict(self._headers), False

    def _check(self, file: RemoteFile, response: Any, first: int) -> int:
        """Whether the answer is the range of the file that was meant; returns how many bytes to pass over."""
        headers = response.headers
        tag = headers.get("ETag")
        with self._lock:
            before = self._tags.setdefault(file.path, tag) if tag else None
        if before is not None and tag != before:
            raise Changed(f"its ETag was {before} and is {tag}")
        if response.status_code == 206:
            begin, size = _content_range(headers.get("Content-Range", ""))
            if size is not None and size != file.size:
                raise Changed(f"the server has {size:,} bytes of it, the repository says {file.size:,}")
            if begin != first:
                raise Changed(f"byte {first:,} was asked for and {begin} came")
            return 0
        length = headers.get("Content-Length", "")
        if length.isdecimal() and int(length) != file.size:
            raise Changed(f"the server has {int(length):,} bytes of it, the repository says {file.size:,}")
        if first > 1 << 20:
            raise Changed("the server sends whole files only, not ranges")
        return first

    def _changed(self, file: RemoteFile, what: str) -> ConvertError:
        return ConvertError(
            Problem(
                "hub_damaged",
                f"{file.path} of {self.repository.title}: {what}.",
                file=file.path,
                hint="Something between here and the Hub (a proxy, a mirror) changes files; try again without it, "
                "or download the repository.",
            )
        )


class _Busy(Exception):
    def __init__(self, error: BaseException, wait: float | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait = wait


class _Cut(Exception):
    def __init__(self, done: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.done = done
        self.error = error


def _status_error(response: Any) -> BaseException:
    from huggingface_hub.utils import hf_raise_for_status

    try:
        hf_raise_for_status(response)
    except Exception as error:
        return error
    return OSError(f"status {response.status_code}")


def _content_range(value: str) -> tuple[int | None, int | None]:
    """``bytes 0-99/1000`` → (0, 1000)."""
    unit, _, rest = value.strip().partition(" ")
    span, _, total = rest.partition("/")
    begin = span.partition("-")[0]
    if unit != "bytes" or not begin.isdecimal():
        return None, None
    return int(begin), int(total) if total.isdecimal() else None


def _timeout() -> Any:
    from huggingface_hub import constants

    seconds = max(float(getattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", _READ_SECONDS)), 1.0)
    return (_CONNECT_SECONDS, seconds, seconds, _CONNECT_SECONDS)
