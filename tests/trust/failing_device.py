"""``python -m tests.trust.failing_device [--workdir DIR]``: a disk whose driver reports errors; root, a loop device.

An ext4 file system lies in a file on a tmpfs that is too small for it, so its device fails when pages are written back:
the error comes from ``fsync`` at last, and the file system may become read-only. Then a source lies there and the file
behind it is cut off, so that reads fail. Each time: exit code 1, one clear error, no output under the name; where the
device works (the control, and after the tmpfs has grown), the bytes of a conversion elsewhere.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.trust.kinds import hashes, make_source

ROOT = Path(__file__).resolve().parents[2]
#: tmpfs that holds the disk, in KiB, of 4.5 MB needed; and what may be said.
SIZES = (1_500, 2_500, 3_500, 4_300, 4_600, 20_000)
SAID = ("No space left on device", "Input/output error", "Read-only file system")

DISK = """
set -e
back=$1/back; disk=$1/disk; mkdir -p $back $disk
mount -t tmpfs -o size=$2k none $back
truncate -s 40m $back/image
mkfs.ext4 -q -F -O ^has_journal -E nodiscard,lazy_itable_init=1 $back/image
loop=$(losetup -f --show $back/image)
trap 'cd /; umount $disk; losetup -d $loop' EXIT
mount -o errors=continue $loop $disk
"""
WRITE = """
set +e
"$PYTHON" -m convert to scratch $1/source-hf $disk/out --verify never --force --quiet; echo "code $?"
ls $disk | grep -v lost+found
mount -o remount,size=40m $back; mount -o remount,rw $disk
"$PYTHON" -m convert to scratch $1/source-hf $disk/again --verify never --force --quiet; echo "code $?"
cp -r $disk/again $1/made
exit 0
"""
READ = """
cp -r $1/source-hf $disk/source; sync; echo 3 > /proc/sys/vm/drop_caches
truncate -s 4m $back/image
set +e
"$PYTHON" -m convert to scratch $disk/source $1/read --verify never --quiet; echo "code $?"
exit 0
"""


def attempt(folder: Path, size: int, body: str) -> str:
    """Run a script on a disk in a mount namespace of its own; what it said."""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", DISK + body, "sh", str(folder), str(size)],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout
    return done.stdout


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=Path)
    folder = Path(parser.parse_args().workdir or tempfile.mkdtemp(prefix="failing-device-"))
    make_source("hf", folder)
    words = [sys.executable, "-m", "convert", "to", "scratch", str(folder / "source-hf"), str(folder / "wanted")]
    subprocess.run([*words, "--verify", "never", "--quiet"], cwd=ROOT, check=True)
    for size in SIZES:
        said = attempt(folder, size, WRITE)
        first, _, rest = said.partition("code ")
        found = [word for word in SAID if word in first]
        print(f"{size:,} KiB: {', '.join(found) or 'written'}", flush=True)
        if size == SIZES[-1]:
            assert not first and rest.startswith("0\nout\n"), said
        else:
            assert found and first.startswith("error: ") and rest.startswith("1\n"), said
            assert "out" not in rest.split("\n")[1:2], said
        if "code 0" in rest:
            assert hashes(folder / "made") == hashes(folder / "wanted"), said
            print("  then, with room enough: the same bytes")
            shutil.rmtree(folder / "made")
    said = attempt(folder, 40_000, READ)
    assert said.startswith("error: ") and str(folder) in said and "code 1" in said, said
    assert not (folder / "read").exists()
    assert not (folder / "read.partial").exists()
    print(f"reading: {said.splitlines()[0]}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
