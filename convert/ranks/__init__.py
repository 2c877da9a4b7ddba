"""One conversion by several processes, on one machine or many: ``torchrun … -m convert …``, or the same under SLURM.

Here only the environment is read, so that an ordinary run imports nothing more. :mod:`convert.ranks.crew` is how the
processes (ranks) hear of each other, :mod:`convert.ranks.shares` who writes what, :mod:`convert.ranks.writers` and
:mod:`convert.ranks.shared` how; :mod:`convert.ranks.command` is the command line's part.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convert.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from convert.plan import ConversionPlan
    from convert.ranks.crew import Crew
    from convert.run import Summary

#: PyTorch's names, and what SLURM calls the same things.
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
#: PyTorch's own usual port.
_PORT = "29500"

_current: Crew | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Which of how many processes this one is.

    Attributes:
        rank: Its number; 0 leads.
        world: How many there are.
        host: Where they meet: host name or address.
        port: The port there.
    """

    rank: int
    world: int
    host: str
    port: int


def place(environ: MutableMapping[str, str] | None = None) -> Place | None:
    """This process's place among several, from the environment; None for an ordinary, single process.

    SLURM's variables count only where ``MASTER_ADDR`` is set: a shell within an allocation has them, too.

    Raises:
        UsageError: The variables contradict each other, or are no numbers.
    """
    env = os.environ if environ is None else environ
    host = env.get("MASTER_ADDR")
    if host is None:
        return None
    for ours, theirs in _SLURM.items():
        if ours not in env and theirs in env:
            env[ours] = env[theirs]
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, world, port = _number(env, "RANK"), _number(env, "WORLD_SIZE"), _number(env, "MASTER_PORT", _PORT)
    if not 0 <= rank < world:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {world}.", hint="torchrun sets both; so does srun.")
    return Place(rank, world, host, port) if world > 1 else None


def _number(env: Mapping[str, str], name: str, usual: str = "") -> int:
    text = env.get(name, usual)
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r}, which is no number.", hint="torchrun sets it; so does srun.")
    return int(text)


def enlist(crew: Crew | None) -> None:
    """Name the processes that this command runs in together; None for an ordinary run."""
    global _current
    _current = crew


def carry_out(plan: ConversionPlan, out: Path, **options: Any) -> Summary | None:
    """:func:`convert.run.run`, by all ranks where there are several; None on all of them but the first."""
    if _current is None:
        from convert.run import run

        return run(plan, out, **options)
    if not plan.source.pool.local:
        raise UsageError(
            "--no-download is for one process.", hint="Without it the ranks of a machine share the library's cache."
        )
    from convert.ranks.shared import run_shared

    return run_shared(plan, out, crew=_current, **options)
