"""The wheel: what it holds, and that it works where nothing of the checkout is near."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def build(source: Path, out: Path) -> Path:
    """Build a wheel from a copy of ``source``, offline, with the setuptools at hand."""
    pytest.importorskip("setuptools")
    pytest.importorskip("wheel")
    copy = out / "source"
    copy.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(source / name, copy)
    for name in ("convert", "mappings"):
        shutil.copytree(source / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(out), str(copy)], check=True, capture_output=True, text=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel alone, unpacked by pip into an empty folder."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True, text=True)
    return target


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an empty folder, with the installed copy before anything else."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=installed.parent, env=environment, capture_output=True, text=True)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {n.split("/")[0] for n in names}
    assert top == {"convert", "ckpt_convert-0.1.0.dist-info"}
    # every module, also of a package that somebody forgot to list in pyproject.toml
    wanted = {str(p.relative_to(ROOT)) for p in (ROOT / "convert").rglob("*.py")}
    assert wanted <= set(names), sorted(wanted - set(names))
    tables = {f"convert/{p.relative_to(ROOT)}" for p in (ROOT / "mappings").rglob("*.toml")}
    assert tables and tables == {n for n in names if n.endswith(".toml")}
    assert "convert/py.typed" in names
    assert not [n for n in names if "test" in n.lower() and n.endswith(".py")]


def test_scripts_extras_and_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    info = "ckpt_convert-0.1.0.dist-info/"
    scripts = archive.read(info + "entry_points.txt").decode()
    assert "convert = convert.cli:main" in scripts and "ckpt-convert = convert.cli:main" in scripts
    metadata = archive.read(info + "METADATA").decode()
    for line in (
        "Requires-Python: >=3.11",
        "Provides-Extra: quantize",
        "Provides-Extra: llamacpp",
        "Provides-Extra: report",
        "Provides-Extra: test",
    ):
        assert line in metadata
    for name in ("numpy", "safetensors", "huggingface_hub", "gguf", "tokenizers", "click", "rich", "torch"):
        assert f"Requires-Dist: {name}" in metadata
    assert any(n.startswith(info) and n.endswith("LICENSE") for n in archive.namelist())


def test_installed_copy_finds_its_own_tables(installed):
    done = run(installed, "-c", "from convert.resources import mappings_dir; print(mappings_dir())")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == installed / "convert" / "mappings"


def test_installed_command_shows_a_table(installed):
    done = run(installed, "-m", "convert", "tables", "show", "llama", "--resolved")
    assert done.returncode == 0, done.stderr
    assert "self_attn.k_proj.weight" in done.stdout and "attention.wk.weight" in done.stdout


def test_without_tables_the_error_says_so(installed, tmp_path):
    """The control: the copy really reads its own tables."""
    broken = tmp_path / "broken"
    shutil.copytree(installed, broken)
    shutil.rmtree(broken / "convert" / "mappings")
    code = "import convert.resources as r\ntry: r.mappings_dir()\nexcept Exception as e: print(type(e).__name__, e)"
    done = run(broken, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TableError") and "not found" in done.stdout
