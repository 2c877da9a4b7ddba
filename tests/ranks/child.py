"""One rank of a test: small pieces, a fault where one is asked for, and then the command line, once or several times.

``BATCH`` holds the command lines as JSON, ``FAULT`` what shall happen: ``kill:1:5`` ends rank 1 with SIGKILL at its
fifth piece, ``full:1:5`` lets its disk be full there, ``slow:0.1`` makes every piece of every rank take so many
seconds, ``blind:1`` shows rank 1 no partial folder. ``LOST`` is how long a rank may be silent, ``CODES`` names a file
for the exit codes of rank 0; with ``LARGE``, sources are taken for large ones.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from typing import Any

from convert import writer
from convert.cli import main
from tests.trust.kinds import small_pieces


def _inject(fault: str, rank: int) -> None:
    what, _, more = fault.partition(":")
    if what == "slow":
        _at_pieces(lambda _: time.sleep(float(more)))
        return
    who, _, when = more.partition(":")
    if rank != int(who):
        return
    if what == "blind":
        from convert.ranks import shared

        shared.partial_folder = lambda out, single: out.with_name("elsewhere")
        return

    def strike(count: int) -> None:
        if count == int(when) and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if count == int(when) and what == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _at_pieces(strike)


def _at_pieces(act: Any) -> None:
    plain, count = writer.Writer.write_piece, [0]

    def write_piece(self: Any, *args: Any) -> Any:
        count[0] += 1
        with writer.writing(self.folder / self.plan.files[0].name):
            act(count[0])
        return plain(self, *args)

    writer.Writer.write_piece = write_piece  # type: ignore[method-assign]


def run_all(batch: list[list[str]]) -> int:
    """Run command lines one after another; returns the last one's exit code."""
    codes = []
    for words in batch:
        try:
            main(words)
        except SystemExit as stop:
            codes.append(int(stop.code or 0))
    if os.environ["RANK"] == "0" and "CODES" in os.environ:
        with open(os.environ["CODES"], "w") as file:
            json.dump(codes, file)
    return codes[-1]


if __name__ == "__main__":
    small_pieces()
    if "LOST" in os.environ:
        from convert.ranks import crew

        crew.LOST_SECONDS = float(os.environ["LOST"])
    if "LARGE" in os.environ:
        from convert import storage_crcs

        storage_crcs.SMALL = 0
    if "FAULT" in os.environ:
        _inject(os.environ["FAULT"], int(os.environ["RANK"]))
    sys.exit(run_all(json.loads(os.environ["BATCH"])))
