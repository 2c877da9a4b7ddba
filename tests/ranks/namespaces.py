"""Two machines in one: two network namespaces with a cable between them, a torchrun in each.

``unshare -rn python -m tests.ranks.namespaces M [SECONDS]``: M ranks on each; with SECONDS the cable is pulled out that
long after rank 0 has begun to write. Prints exit code, output and errors of both as JSON. Leaves nothing: namespaces
end with their processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def ip(words: str, within: list[str]) -> None:
    """Run ``ip``."""
    subprocess.run([*within, "ip", *words.split()], check=True, stderr=subprocess.PIPE)


def connect(other: int) -> list[str]:
    """Lay the cable; returns what runs a command on the other side."""
    within = ["nsenter", "-t", str(other), "-n"]
    ip("link set lo up", [])
    ip("link set lo up", within)
    ip(f"link add near type veth peer name far netns {other}", [])
    ip("addr add 10.77.0.1/24 dev near", [])
    ip("link set near up", [])
    ip("addr add 10.77.0.2/24 dev far", within)
    ip("link set far up", within)
    return within


def main(ranks: int, pull: float | None, partial: Path) -> None:
    """Run both sides."""
    holder = subprocess.Popen(["unshare", "-n", "sleep", "600"])
    try:
        while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        within = connect(holder.pid)
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)]
        words += ["--master-addr", "10.77.0.1", "--master-port", "29511"]
        sides = [
            subprocess.Popen(
                [*prefix, *words, "--node-rank", str(node), "-m", "tests.ranks.child"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node, prefix in enumerate(([], within))
        ]
        if pull is not None:
            while not partial.exists() and sides[0].poll() is None:
                time.sleep(0.05)
            time.sleep(pull)
            ip("link set near down", [])
        said = [side.communicate(timeout=150) for side in sides]
        print(json.dumps([[side.returncode, *texts] for side, texts in zip(sides, said, strict=True)]))
    finally:
        holder.kill()
        holder.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else None, Path(os.environ["PARTIAL"]))
