"""Downloads that were given their size first and did not finish: found in every format, and nothing sound is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import convert
from convert.cli import cli, run
from convert.inspect import inspect
from convert.source import FilePool
from convert.validate import validate
from convert.zero_tails import zero_tails
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch
from tests.fixtures.shapes import Shape

#: Matrices of 8 to 512 KiB in bfloat16.
SHAPE = Shape(64, 8, 2, 8, 96, 4096)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    scratch = make_scratch(root / "start", SHAPE, dtype="bfloat16")
    convert.convert_checkpoint(scratch.path, root / "dcp", to="scratch", format="dcp", tokenizer=False)
    return {
        "safetensors": make_hf(root / "hf", SHAPE, dtype="bfloat16").path,
        "gguf": make_gguf(root / "gguf" / "model.gguf", SHAPE, type="bf16", tokenizer=300).path,
        "q8_0": make_gguf(root / "q8_0" / "model.gguf", SHAPE, type="q8_0", tokenizer=300).path,
        "pth": make_scratch(root / "pth", SHAPE, format="pth", dtype="bfloat16").path,
        "strided": make_scratch(root / "strided", SHAPE, format="pth", strided=True).path,
        "meta": make_meta(root / "meta", SHAPE, mp=2).path,
        "bin": make_hf(root / "bin", SHAPE, format="bin").path,
        "dcp": root / "dcp",
    }


def copy(path: Path, to: Path) -> Path:
    if path.is_dir():
        return Path(shutil.copytree(path, to))
    to.mkdir()
    return Path(shutil.copy(path, to))


def extents(path: Path) -> tuple[Path, list[tuple[int, int, str]]]:
    """The file that is largest, and its tensors in order."""
    with convert.open_checkpoint(path) as opened:
        file = max(opened.files, key=lambda p: p.stat().st_size)
        specs = [(s, n) for n, parts in opened.tensors.items() for p in parts for s in (p.parts or (p,))]
        found = sorted((s.offset, s.offset + s.nbytes, n) for s, n in specs if s.file == file)
    return file, found


def blank(file: Path, tensors: list[tuple[int, int, str]], start: int) -> None:
    """Zeros in all tensors from a byte on; what lies between them (a zip's headers) stays."""
    with open(file, "r+b") as out:
        for low, high, _ in tensors:
            if high > start:
                out.seek(max(low, start))
                out.write(bytes(high - max(low, start)))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.62])
@pytest.mark.parametrize("form", ["safetensors", "gguf", "q8_0", "pth", "strided", "meta", "bin", "dcp"])
def test_a_cut_file_is_found(made, tmp_path, form, share):
    path = copy(made[form], tmp_path / form)
    assert validate(path).ok, "the control"
    file, tensors = extents(path)
    start = tensors[0][0] + int((tensors[-1][1] - tensors[0][0]) * share)
    blank(file, tensors, start)
    found = validate(path)
    (problem,) = [p for p in found.problems if p.kind == "zero_tail"]
    assert problem.file is not None and Path(problem.file).name == file.name
    first = next(n for low, high, n in tensors if high > start)
    assert problem.tensor == first and found.exit_code == 1
    reached = len({n for low, high, n in tensors if high > start})
    assert f", {reached} tensor{'s' if reached > 1 else ''}. A download" in problem.message
    # as exactly as the values themselves allow: their last bytes before the cut may be zeros
    assert start - 64 <= problem.found <= start + 64


def order(path: Path) -> list[str]:
    """Tensors of a safetensors file as they lie."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    return sorted(header, key=lambda n: header[n]["data_offsets"])


def relaid(folder: Path, state: dict[str, torch.Tensor], last: list[str]) -> None:
    """The same model with some tensors at the end of its file."""
    path = folder / "model.safetensors"
    names = [n for n in state if n not in last] + last
    header, at = {}, 0
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32"}
    for name in names:
        size = state[name].numel() * state[name].element_size()
        header[name] = {
            "dtype": kinds[state[name].dtype],
            "shape": list(state[name].shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(state[n].contiguous().view(torch.uint8).numpy().tobytes() for n in names)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert order(path) == names and load_file(path).keys() == state.keys()


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_what_models_have_for_a_reason_is_let_pass(tmp_path):
    folder = make_hf(tmp_path / "m", SHAPE, dtype="bfloat16", attention_bias=True).path
    state = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}  # the file is written anew
    biases = [n for n in state if n.endswith(".bias")]
    assert len(biases) >= 4

    def flagged(changes: dict[str, torch.Tensor], last: list[str]) -> bool:
        relaid(folder, state | changes, last)
        with convert.open_checkpoint(folder) as opened:
            return bool(zero_tails(opened))

    zeros = {n: torch.zeros_like(state[n]) for n in state}
    padded = state[HEAD].clone()
    padded[-1024:] = 0  # 128 KiB of rows
    torn = state[HEAD].clone()
    torn.view(-1)[-1024 * 64 + 24 :] = 0  # the same, from the middle of a row on
    assert not flagged({}, [])
    assert not flagged({HEAD: zeros[HEAD]}, [HEAD]), "a fresh head"
    assert not flagged({n: zeros[n] for n in biases}, biases), "fresh biases"
    assert not flagged({n: zeros[n] for n in [HEAD, *biases]}, [*biases, HEAD]), "both"
    assert not flagged({HEAD: padded}, [HEAD]), "a padded vocabulary"
    assert flagged({HEAD: torn}, [HEAD])
    assert flagged({n: zeros[n] for n in (HEAD, EMBEDDING)}, [EMBEDDING, HEAD])
    assert flagged({HEAD: torn, **{n: zeros[n] for n in biases}}, [HEAD, *biases]), "zeros behind do not hide it"


@pytest.mark.parametrize("behind", [4, 64 << 10, (64 << 10) + 512, 303_001])
def test_up_to_64_kib_at_the_end_of_a_matrix_may_be_padding(tmp_path, behind):
    folder = make_hf(tmp_path / "m", Shape(64, 8, 2, 8, 3000, 128), dtype="bfloat16").path
    state = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    last = "model.layers.1.mlp.down_proj.weight"
    state[last].view(-1).view(torch.uint8)[-behind:] = 0
    relaid(folder, state, [last])
    assert ("zero_tail" in [p.kind for p in validate(folder).problems]) == (behind > 64 << 10)


def test_rows_of_zeros_between_others_are_no_tail(tmp_path):
    """A vocabulary with dead rows all over: looks that meet zeros by chance must not make a tail of them."""
    folder = make_hf(tmp_path / "m", SHAPE, dtype="bfloat16").path
    state = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}  # the file is written anew
    for keep in (3, 17, 200):
        sparse = state[HEAD].clone()
        sparse[torch.arange(4096) % keep != 0] = 0
        relaid(folder, state | {HEAD: sparse}, [HEAD])
        assert validate(folder).ok


def test_every_file_is_told(tmp_path):
    folder = make_hf(tmp_path / "m", SHAPE, dtype="bfloat16", sharded=3).path
    assert validate(folder).ok
    for path in sorted(folder.glob("*.safetensors"))[1:]:
        raw = path.read_bytes()
        size = 8 + int.from_bytes(raw[:8], "little")
        path.write_bytes(raw[:size] + bytes(len(raw) - size))
    found = [p for p in validate(folder).problems if p.kind == "zero_tail"]
    assert [Path(p.file).name[:11] for p in found] == ["model-00002", "model-00003"]


def test_conversions_and_inspect_warn(made, tmp_path, capsys):
    path = copy(made["safetensors"], tmp_path / "hf")
    for words in (["inspect", str(path)], ["hf-to-meta", str(path), str(tmp_path / "a"), "--dry-run"]):
        assert run(cli, words) == 0
        assert "WARNING" not in capsys.readouterr().out
    file, tensors = extents(path)
    blank(file, tensors, tensors[0][0] + 700_000)
    for words in (
        ["inspect", str(path)],
        ["hf-to-meta", str(path), str(tmp_path / "b"), "--dry-run"],
        ["hf-to-meta", str(path), str(tmp_path / "b"), "--verify", "never"],
    ):
        assert run(cli, words) == 0
        said = capsys.readouterr().out
        assert "WARNING: model.safetensors holds only zeros from about byte" in said and "Fetch" in said
    assert inspect(path).notes[0].startswith("WARNING")


def test_a_sound_file_costs_one_look(made, monkeypatch):
    looks: list[int] = []
    real = FilePool.read_into
    for form, files in (("safetensors", 1), ("meta", 2), ("gguf", 1)):
        with convert.open_checkpoint(made[form]) as opened:
            looks.clear()
            monkeypatch.setattr(
                FilePool, "read_into", lambda self, p, b, at: (looks.append(len(b)), real(self, p, b, at))[1]
            )
            assert zero_tails(opened) == []
            assert len(looks) == files and max(looks) <= 4096
            opened.pool.local = False  # on the Hub: nothing is asked for
            assert zero_tails(opened) == [] and len(looks) == files
