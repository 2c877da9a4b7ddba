"""What inspect says, against torch's and transformers' own counts; and on what evidence it calls a head tied."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert.checkpoint
from convert.cli import cli, run
from convert.errors import ConvertError, UsageError
from convert.inspect import inspect
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch

JSON_KEYS = (
    "schema format layout family dtype parameters parameters_stored tied rope n_layers n_heads n_kv_heads head_dim "
    "vocab_size tensors notes record"
)
ROOT = Path(__file__).parent.parent


def sparse_llama(folder: Path, size: str, *, head: bool) -> Path:
    """A Hugging Face folder with a published size's header and a hole for data; it takes no space."""
    from convert import config as configs
    from convert.layout import Dims, expand
    from convert.table import load_table

    table = load_table("llama")
    config = configs.published(table, size)
    slots = expand(table, Dims(table, config), "hf")
    header, at = {}, 0
    for name, slot in slots.items():
        if name == "lm_head.weight" and not head:
            continue
        count = 2 * torch.Size(slot.shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(slot.shape), "data_offsets": [at, at + count]}
        at += count
    raw = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
        last = max(t["data_offsets"][1] for n, t in header.items() if n != "lm_head.weight")  # which equals another
        file.seek(8 + len(raw) + last - 2)
        file.write(b"\x80\x3f")  # a one, or it would be a cut download
    (folder / "config.json").write_text(json.dumps(configs.to_hf(table, config, "BF16")))
    return folder


def test_llama_3_2_1b_with_its_head_stored(tmp_path):
    found = inspect(sparse_llama(tmp_path / "big", "llama3.2-1b", head=True))
    assert (found.parameters_stored, found.parameters) == (1_498_482_688, 1_235_814_400)
    assert found.tied is True and "sampled" in found.tied_evidence
    assert found.size == "llama3.2-1b"
    assert found.kv_bytes() == 2 * 16 * 8 * 64 * 2
    assert found.components["embedding"] == found.components["head"] == 128256 * 2048
    assert found.components["norms"] == 33 * 2048
    text = dict(found.lines())
    assert "4 times smaller" in text["heads"] and f"{2 * 16 * 24 * 64 * 2048:,} parameters" in text["heads"]
    assert "131,072" in text["sizes"]


def test_llama_3_2_1b_without_its_head(tmp_path):
    found = inspect(sparse_llama(tmp_path / "big", "llama3.2-1b", head=False))
    assert found.parameters_stored == found.parameters == 1_235_814_400
    assert found.tied is True and "not stored" in found.tied_evidence


@pytest.mark.parametrize("size", ["llama3-8b", "llama3.1-8b", "llama3.3-70b"])
def test_sizes_differ_by_their_rope(tmp_path, size):
    found = inspect(sparse_llama(tmp_path / "big", size, head=True))
    assert size in (found.size or "").split(" or ")
    if size == "llama3-8b":
        assert found.size == size


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {
        "hf": make_hf(root / "hf", "gqa8", dtype="bfloat16", scaling=32),
        "bias": make_hf(root / "bias", "gqa8", attention_bias=True, mlp_bias=True, sharded=3),
        "meta": make_meta(root / "meta", "h32kv8", mp=8, rope_freqs=True, dtype="bfloat16"),
        "scratch": make_scratch(root / "scratch", "std", format="pth"),
        "gguf": make_gguf(root / "model.gguf", "gqa6"),
        "hd16": make_hf(root / "hd16", "hd16"),
    }


@pytest.mark.parametrize("name", ["hf", "bias", "meta", "scratch", "gguf", "hd16"])
def test_numbers(made, name):
    fixture = made[name]
    found = inspect(fixture.path)
    said = found.as_json()
    assert list(said) == JSON_KEYS.split()
    assert said["schema"] == "convert.inspect/1"
    json.dumps(said)
    shape = fixture.shape
    assert said["layout"] == {"bias": "hf", "hd16": "hf"}.get(name, name)
    assert (said["n_layers"], said["n_heads"], said["n_kv_heads"]) == (shape.layers, shape.heads, shape.kv_heads)
    assert (said["head_dim"], said["vocab_size"]) == (shape.head_dim, shape.vocab)
    assert said["parameters"] == said["parameters_stored"] == sum(t.numel() for t in fixture.tensors.values())
    assert said["tied"] is False
    assert said["rope"]["rope_theta"] == shape.theta
    assert found.problems == 0
    assert sum(found.components.values()) == said["parameters"]
    listed = {t["name"]: (t["shape"], t["bytes"]) for t in said["tensors"] if t["name"] != "rope.freqs"}
    # a norm that every model-parallel file repeats is listed once
    assert listed == {n: (list(t.shape), t.numel() * t.element_size()) for n, t in fixture.tensors.items()}


def test_types(made):
    assert inspect(made["hf"].path).as_json()["dtype"] == "bfloat16"
    assert inspect(made["scratch"].path).as_json()["dtype"] == "float32"


def test_a_buffer_is_no_parameter(made):
    found = inspect(made["meta"].path)
    assert any("rope.freqs" in n for n in found.notes)
    assert "rope.freqs" in {t.name for t in found.tensors}


def test_cache_and_parameters_are_what_transformers_has(made):
    transformers = pytest.importorskip("transformers")
    for name in ("hf", "hd16"):
        fixture = made[name]
        model = transformers.LlamaForCausalLM.from_pretrained(fixture.path)
        cache = transformers.DynamicCache(config=model.config)
        tokens = 7
        model(torch.zeros((1, tokens), dtype=torch.long), past_key_values=cache, use_cache=True)
        count = sum(x.numel() for layer in cache.layers for x in (layer.keys, layer.values))
        found = inspect(fixture.path)
        assert found.kv_bytes() == 2 * count // tokens
        assert found.kv_bytes(item=4) == 4 * count // tokens
        assert found.parameters == model.num_parameters()


def tie_cases(root: Path):
    shared = make_scratch(root / "shared", "tied", format="pth", shared=True).path
    twice = make_scratch(root / "twice", "tied", format="pth").path
    yield shared, True, "one storage"
    yield twice, True, "checksums"
    yield make_scratch(root / "st", "tied").path, True, "sampled"
    yield make_hf(root / "absent", "tied").path, True, "not stored"
    yield make_hf(root / "equal", "tied", head="equal").path, True, "sampled"
    yield make_hf(root / "differs", "tied", head="different").path, False, "sampled"
    yield make_scratch(root / "untied", "std", format="pth").path, False, "checksums"
    yield make_meta(root / "meta", "tied", mp=2).path, True, "sampled"
    yield make_gguf(root / "tied.gguf", "tied").path, True, "not stored"


def test_evidence_of_a_tie(tmp_path):
    for path, tied, evidence in tie_cases(tmp_path):
        found = inspect(path)
        assert found.tied is tied, path
        assert evidence in found.tied_evidence, (path, found.tied_evidence)
        head = next((t for t in found.tensors if t.name == "output.weight" or "head" in t.name), None)
        twice = head is not None and tied
        rows = head.shape[0] * head.shape[1] if twice and head else 0
        assert found.parameters_stored - found.parameters == rows


def test_one_differing_row_in_a_small_head_is_seen(tmp_path):
    fixture = make_hf(tmp_path / "m", "tied", head="equal")
    path = fixture.path / "model.safetensors"
    state = load_file(path)
    state["lm_head.weight"][50, 3] += 1
    save_file(state, path)
    assert inspect(fixture.path).tied is False


def test_findings_are_counted_and_do_not_stop(tmp_path):
    fixture = make_hf(tmp_path / "m", "std")
    state = load_file(fixture.path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"], state["lm_head.weight"]
    state["surprise"] = torch.zeros(3)
    save_file(state, fixture.path / "model.safetensors")
    found = inspect(fixture.path)
    assert found.problems == 3
    assert found.tied is None and "lm_head.weight" in found.tied_evidence
    assert dict(found.lines())["problems"].startswith("3 findings; `convert validate`")
    assert found.components["other"] == 3


def test_what_cannot_be_opened_raises(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        inspect(tmp_path / "absent")
    fixture = make_scratch(tmp_path / "m", "std", config=False)
    with pytest.raises(ConvertError, match="head counts do not follow"):
        inspect(fixture.path)


def test_the_order_of_q_and_k_and_how_it_is_known(made, tmp_path):
    assert inspect(made["meta"].path).pairing.startswith("interleaved order")
    assert "by the names" in inspect(made["hf"].path).pairing
    said = inspect(made["hf"].path, qk_layout="meta")
    assert said.pairing.startswith("interleaved order") and "--qk-layout" in said.pairing
    convert.convert_checkpoint(made["hf"].path, tmp_path / "s", to="scratch")
    written = inspect(tmp_path / "s")
    assert "recorded" in written.pairing
    assert any(k == "written by" and "from the hf layout" in line for k, line in written.lines())


def test_a_notebook_shows_the_same_and_escapes_names(tmp_path):
    fixture = make_hf(tmp_path / "<b>x", "std")
    with convert.checkpoint.open_checkpoint(fixture.path) as checkpoint:
        html = checkpoint._repr_html_()
    assert "<b>x" not in html and "&lt;b&gt;x" in html
    assert "<th" in html and "tied head" in html


def test_command(made, capsys):
    assert run(cli, ["inspect", str(made["bias"].path), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.1.self_attn.q_proj.bias" in out and "layout" in out
    assert run(cli, ["inspect", str(made["bias"].path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == inspect(made["bias"].path).as_json()
    assert run(cli, ["inspect", str(made["bias"].path) + "x"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_no_torch_and_little_reading(tmp_path):
    folder = sparse_llama(tmp_path / "big", "llama3.2-1b", head=True)
    code = (
        "import sys; from convert.cli import cli, run\n"
        f"assert run(cli, ['inspect', {str(folder)!r}]) == 0 and run(cli, ['validate', {str(folder)!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'gguf', 'rich'} & set(sys.modules), 'heavy import'\n"
        # ru_maxrss would tell the size of the process that forked this one
        "from pathlib import Path; status = Path('/proc/self/status')\n"
        "print(status.read_text().split('VmHWM:')[1].split()[0] if status.exists() else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 100 * 1024  # KiB
