"""Lists of hashes with folders in them: each line speaks of the file that it means, and of no file of that name."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

import convert
from convert.listed_files import assign
from tests.fixtures import make_meta

NAMES = ["consolidated.00.pth", "consolidated.01.pth", "params.json"]


@pytest.fixture
def models(tmp_path):
    """Two models side by side whose files are called alike."""
    root = tmp_path / "models"
    make_meta(root / "llama", "gqa8", mp=2, seed=1)
    make_meta(root / "other", "gqa8", mp=2, seed=2)
    return root


def summed(folder: Path, names: list[str], tool: str = "sha256sum") -> str:
    return subprocess.run([tool, *names], cwd=folder, capture_output=True, text=True, check=True).stdout


def both(root: Path) -> list[str]:
    return [f"{model}/{name}" for model in ("llama", "other") for name in NAMES]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def validated(folder: Path, place: Path):
    found = convert.validate(folder, checksums=place)
    return found, [(p.kind, Path(p.file or "").name) for p in found.problems if p.kind != "crc"]


@pytest.mark.parametrize("tool", ["sha256sum", "md5sum"])
@pytest.mark.parametrize("where", ["above", "elsewhere", "within"])
def test_a_list_of_two_models_is_compared_with_the_right_one(models, tmp_path, where, tool):
    place = {"above": models, "elsewhere": tmp_path, "within": models / "llama"}[where] / "SUMS"
    place.write_text(summed(models, both(models), tool))
    for model in ("llama", "other"):
        found, problems = validated(models / model, place)
        assert found.ok and not problems
        assert sorted(h.path.name for h in found.hashes if h.ok) == NAMES
        assert {h.path.parent.name for h in found.hashes} == {model}, "nothing of the other is read"
    flip(models / "llama" / NAMES[1])
    assert ("hash", NAMES[1]) in validated(models / "llama", place)[1]
    assert validated(models / "other", place)[0].ok


def test_a_list_of_a_sibling_alone_is_not_of_this_model(models, tmp_path):
    place = tmp_path / "SUMS"
    place.write_text(summed(models, [f"other/{n}" for n in NAMES[:2]]))
    found, problems = validated(models / "llama", place)
    assert problems == [("checksums", NAMES[0]), ("checksums", NAMES[1])] and found.exit_code == 1
    text = "\n".join(found.lines())
    assert "speaks of other folders" in text and "other/consolidated.00.pth" in text and "damaged" not in text
    moved = Path(shutil.move(models / "other", tmp_path / "renamed"))
    assert validated(moved, place)[0].ok, "an equal hash says that it was meant, whatever the folder is called now"


def test_a_list_that_lies_above_and_speaks_of_siblings(models):
    """They are there, and are still no files of this model."""
    place = models / "SUMS"
    place.write_text(summed(models, [f"other/{n}" for n in NAMES]))
    assert [kind for kind, _ in validated(models / "llama", place)[1]] == ["checksums"] * 2, "params.json is the same"
    assert validated(models / "other", place)[0].ok


def test_paths_from_elsewhere(models, tmp_path):
    """Absolute ones and such that go up: their ends count."""
    place = tmp_path / "SUMS"
    digest = {n: hashlib.sha256((models / "llama" / n).read_bytes()).hexdigest() for n in NAMES}
    for start in ("/data/models/llama/", "../llama/", "../../x/llama/", "llama/", ""):
        place.write_text("".join(f"{digest[n]}  {start}{n}\n" for n in NAMES))
        assert validated(models / "llama", place)[0].ok, start
        place.write_text("".join(f"{'0' * 64}  {start}{n}\n" for n in NAMES))
        assert [k for k, _ in validated(models / "llama", place)[1]] == ["hash"] * 3, start


def test_the_nearest_line_counts_and_a_tie_is_none(tmp_path):
    folder = tmp_path / "b" / "llama"
    folder.mkdir(parents=True)
    file = folder / "x.pth"
    file.touch()
    (tmp_path / "lists").mkdir()

    def given(*lines: str):
        return assign({n: str(i) for i, n in enumerate(lines)}, place=tmp_path / "lists", weights=[file])

    assert given("x.pth", "llama/x.pth", "other/x.pth").certain == {file: "llama/x.pth"}
    assert given("a/llama/x.pth", "b/llama/x.pth").certain == {file: "b/llama/x.pth"}
    assert given("x.pth", "other/x.pth").certain == {file: "x.pth"}
    assert given("c/llama/x.pth", "d/llama/x.pth").unsure == {file: ["c/llama/x.pth", "d/llama/x.pth"]}
    assert given("c/x.pth", "d/x.pth").unsure == {file: ["c/x.pth", "d/x.pth"]}
    assert given("llama/x.pth", "llama/y.pth", "other/z.pth").absent == ["llama/y.pth"]
    assert given("y.pth", "other/z.pth").absent == ["y.pth", "other/z.pth"]
