"""Which of how many processes one is, from the environment; and that an ordinary run imports nothing for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from convert.errors import UsageError
from convert.ranks import Place, place


def test_torchrun_and_srun_say_the_same():
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29501"}
    assert place(torchrun) == Place(1, 4, "node0", 29501)
    srun = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "MASTER_ADDR": "node0"}
    assert place(srun) == Place(3, 4, "node0", 29500)
    assert (srun["RANK"], srun["WORLD_SIZE"], srun["LOCAL_RANK"]) == ("3", "4", "1")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a shell within an allocation
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
        {"MASTER_ADDR": "localhost"},
        {"RANK": "1", "WORLD_SIZE": "4"},
    ],
)
def test_one_process_is_an_ordinary_run(environ):
    assert place(environ) is None


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "4"), ("RANK", "-1"), ("WORLD_SIZE", "many"), ("MASTER_PORT", "")]
)
def test_what_contradicts_itself_is_refused(name, value):
    good = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert place(dict(good)) is not None
    with pytest.raises(UsageError, match=f"{'RANK' if name == 'RANK' else name} is"):
        place(good | {name: value})


def test_an_ordinary_run_imports_no_torch():
    code = "import sys, convert.cli, convert.commands.conversions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
