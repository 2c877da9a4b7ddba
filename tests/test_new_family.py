"""The README's worked example: one table and one reference model make a family that every command knows."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
import convert.reference
import convert.resources
from convert.cli import cli, run
from convert.errors import ConvertError
from convert.reference.loading import load_reference
from convert.table import families, heads, load_table
from tests.families.mixed import fill, off, prompt
from tests.reference.models import one_thread  # noqa: F401
from tests.test_readme import ROOT, TEXT, blocks

transformers = pytest.importorskip("transformers")

FAMILY = "normllama"
SIZES = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "rms_norm_eps": 1e-5},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512},
}


def reference_text() -> str:
    """The README's reference model: the one Python block that defines a class."""
    (text,) = [block for block in blocks("python") if "\nclass " in block]
    return text


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout to which the README's two files were added, and nothing else."""
    shutil.copytree(convert.resources.mappings_dir(), tmp_path / "mappings")
    (tmp_path / "mappings" / f"{FAMILY}.toml").write_text(blocks("toml")[1], encoding="utf-8")
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / f"{FAMILY}.py").write_text(reference_text(), encoding="utf-8")
    monkeypatch.setattr(convert.resources, "__file__", str(tmp_path / "convert" / "resources.py"))
    monkeypatch.setattr(
        convert.reference, "__path__", [*convert.reference.__path__, str(tmp_path / "reference")], raising=True
    )
    load_table.cache_clear()
    yield tmp_path
    load_table.cache_clear()
    sys.modules.pop(f"convert.reference.{FAMILY}", None)
    vars(convert.reference).pop(FAMILY, None)


def make(folder: Path, *, seed: int = 0) -> Any:
    """What somebody else's code would have saved: transformers' Llama behind a norm of its own."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    norm = type(model.model.norm)(64, eps=1e-5)
    fill(model, seed)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(seed))
        logits = model.eval()(inputs_embeds=norm(model.model.embed_tokens(prompt(128)))).logits
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors") | {"model.embed_norm.weight": norm.weight.detach().clone()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": FAMILY, "architectures": ["NormLlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return SimpleNamespace(path=folder, state=state, logits=logits, plain=model)


def test_two_files_make_a_family(added, capsys):
    made = make(added / "hf")
    assert FAMILY in families()
    assert run(cli, ["tables", "check", str(added / "mappings" / f"{FAMILY}.toml"), "--against", str(made.path)]) == 0
    convert.convert_checkpoint(made.path, added / "scratch", to="scratch", tokenizer=False)
    convert.convert_checkpoint(added / "scratch", added / "back", to="hf", tokenizer=False)
    back = load_file(added / "back" / "model.safetensors")
    assert back.keys() == made.state.keys() and not [k for k in back if not torch.equal(back[k], made.state[k])]
    config = json.loads((added / "back" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (FAMILY, ["NormLlamaForCausalLM"])
    for path in (made.path, added / "scratch"):
        with convert.open_checkpoint(path) as opened:
            assert opened.family == FAMILY and opened.match.problems == []
            model = load_reference(opened)
        with torch.no_grad():
            assert off(model(prompt(128)), made.logits) < 1e-4
            assert off(made.plain(prompt(128)).logits, made.logits) > 1  # control: the norm is what makes it another
    model.load_state_dict(load_file(added / "scratch" / "model.safetensors"), strict=True)
    assert convert.verify(made.path, added / "scratch", device="cpu").verdict == "pass"
    other = make(added / "other", seed=1)
    assert convert.verify(made.path, other.path, device="cpu").verdict == "fail"
    capsys.readouterr()
    for arguments in (["inspect", str(made.path)], ["families"], ["validate", str(added / "scratch")]):
        assert run(cli, arguments) == 0
        assert arguments[0] == "validate" or FAMILY in capsys.readouterr().out
    assert run(cli, ["families"]) == 0
    said = {text.split(":")[0]: text for text in capsys.readouterr().out.split("\n\n")}
    # what is inherited of layouts that the family has not is not said of it
    assert "refused       meta" in said["llama"] and "refused       meta" not in said[FAMILY]
    assert "GGUF arch     llama\n" in said["llama"] and "GGUF arch     –\n" in said[FAMILY]
    with pytest.raises(ConvertError, match="has no gguf layout, only hf, scratch"):
        convert.convert_checkpoint(made.path, added / "x.gguf", to="gguf", tokenizer=False)


def test_without_them_there_is_none(tmp_path):
    made = make(tmp_path / "hf")
    with pytest.raises(ConvertError, match=f"'{FAMILY}', which no table describes") as error:
        convert.open_checkpoint(made.path)
    assert "`model.embed_norm.weight`" in str(error.value)  # the nearest family, and what it lacks


def test_begun_by_the_command_it_says(tmp_path):
    """`convert tables init … --as normllama` gives the head of the README's table."""
    assert f"`convert tables init --family llama --as {FAMILY}`" in TEXT
    path = tmp_path / f"{FAMILY}.toml"
    assert run(cli, ["tables", "init", "--family", "llama", "--as", FAMILY, "--out", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    shown = [line.split("=")[0].strip() for line in blocks("toml")[1].splitlines() if " = " in line]
    for key in ("family", "title", "extends", "model_types", "architectures", "layouts"):
        assert key in shown and f"\n{key} = " in text


def test_the_families_table_is_complete():
    rows = {m[1]: m[0] for m in re.finditer(r"^\| `(\w+)` \|.*$", TEXT.split("## Families")[1], re.MULTILINE)}
    said = heads()
    assert set(said) <= set(rows)
    for family, row in ((f, rows[f]) for f in said):
        table = load_table(family)
        cells = [c.strip() for c in row.strip("| ").split(" | ")]
        assert [x.strip("` ").split("`")[0] for x in cells[2].split(",")] == list(table.layouts), family
        assert cells[3] == f"`{table.gguf_arch}`"
        assert table.sizes
    assert (ROOT / "tests" / "test_new_family.py").is_file() and "tests/test_new_family.py" in TEXT
