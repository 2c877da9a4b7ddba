"""What commands that run models import: torch after all that can be refused without it, and never its compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import make_hf

ROOT = Path(__file__).parent.parent
#: Runs command lines (or, for the control, a program) and says which of these were imported.
_CHILD = """
import json, sys
from convert.cli import cli, run
codes = [run(cli, one) if isinstance(one, list) else exec(one) for one in json.loads(sys.argv[1])]
print(json.dumps([codes, "torch" in sys.modules, "torch._dynamo" in sys.modules]))
"""
COMMANDS = [
    ["verify", "{src}", "{good}", "--device", "cpu", "--quiet"],
    ["verify", "{good}", "{src}", "--device", "cpu", "--quiet"],
    ["generate", "{src}", "--prompt", "llamas", "-n", "1", "--device", "cpu", "--quiet"],
    ["diagnose", "{src}", "--device", "cpu", "--quiet"],
]


def ran(*what: list[str] | str) -> tuple[list[int | None], bool, bool]:
    """Exit codes, whether torch was imported, and whether its compiler was."""
    command = [sys.executable, "-c", _CHILD, json.dumps(what)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=True)
    codes, torch, compiler = json.loads(done.stdout.splitlines()[-1])
    return codes, torch, compiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_hf(tmp_path_factory.mktemp("imports") / "hf", "gqa8", vocab=320, tokenizer=True).path


def commands(src, good):
    return [[word.format(src=src, good=good) for word in command] for command in COMMANDS]


@pytest.mark.timeout(400)
def test_what_is_damaged_is_refused_without_torch(folder, tmp_path):
    cut, deep = tmp_path / "cut", tmp_path / "deep"
    for copy in (cut, deep):
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])
    config = json.loads((deep / "config.json").read_text())
    (deep / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1000}))
    asked = [*commands(cut, folder), *commands(deep, folder)]
    assert ran(*asked) == ([1] * len(asked), False, False)


@pytest.mark.timeout(700)
def test_what_is_sound_runs_without_torchs_compiler(folder):
    """An embedding that draws numbers on ``meta`` loads it: 1.3 s and 110 MB for nothing."""
    verify, _, generate, _ = commands(folder, folder)
    codes, torch, compiler = ran(verify, generate)
    assert not set(codes) - {0, 3} and torch and not compiler
    drawing = "import torch; torch.nn.Embedding(4, 4, device='meta')"
    assert ran(drawing) == ([None], True, True)  # the control: this torch would
