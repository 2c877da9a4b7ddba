"""The key-values of our files, read by the ``gguf`` package: what the loader demands, with the types it demands."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

import convert
from convert.cli import main
from convert.errors import ConvertError, UsageError
from convert.formats.gguf_edit import set_metadata
from convert.formats.gguf_values import Str, infer
from convert.gguf_metadata import size_label
from convert.model_card import many, one, read_card
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch
from tests.fixtures.tokenizer import save_tokenizer
from tests.gguf_files import keys

#: What llama.cpp's loader reads of the llama architecture and of every model, with the types it insists on.
LOADER = {
    "general.architecture": "STRING",
    "general.type": "STRING",
    "general.name": "STRING",
    "general.size_label": "STRING",
    "general.file_type": "UINT32",
    "general.quantization_version": "UINT32",
    "llama.context_length": "UINT32",
    "llama.embedding_length": "UINT32",
    "llama.block_count": "UINT32",
    "llama.feed_forward_length": "UINT32",
    "llama.attention.head_count": "UINT32",
    "llama.attention.head_count_kv": "UINT32",
    "llama.attention.key_length": "UINT32",
    "llama.attention.value_length": "UINT32",
    "llama.attention.layer_norm_rms_epsilon": "FLOAT32",
    "llama.rope.dimension_count": "UINT32",
    "llama.rope.freq_base": "FLOAT32",
    "llama.vocab_size": "UINT32",
    "tokenizer.ggml.model": "STRING",
    "tokenizer.ggml.pre": "STRING",
    "tokenizer.ggml.tokens": "ARRAY:STRING",
    "tokenizer.ggml.token_type": "ARRAY:INT32",
    "tokenizer.ggml.merges": "ARRAY:STRING",
    "tokenizer.ggml.bos_token_id": "UINT32",
    "tokenizer.ggml.eos_token_id": "UINT32",
    "tokenizer.ggml.add_bos_token": "BOOL",
    "tokenizer.ggml.add_eos_token": "BOOL",
}


def export(source: Path, out: Path, **options: object) -> dict[str, tuple[str, object]]:
    """Write f32 and read the key-values."""
    convert.convert_checkpoint(source, out, to="gguf", **{"type": "f32", **options})
    return keys(out)


@pytest.mark.parametrize("maker", [make_hf, make_meta, make_scratch])
@pytest.mark.parametrize("shape", ["gqa8", "h32kv4", "hd6"])
def test_everything_the_loader_wants_typed_as_it_wants_it(tmp_path, maker, shape):
    made = maker(tmp_path / "source", shape)
    (tmp_path / "t").mkdir()
    save_tokenizer(tmp_path / "t", made.shape.vocab)
    found = export(made.path, tmp_path / "a.gguf", tokenizer_path=tmp_path / "t")
    assert {k: found[k][0] for k in LOADER if k in found} == LOADER
    s = made.shape
    wanted = {
        "embedding_length": s.hidden,
        "block_count": s.layers,
        "feed_forward_length": s.ff,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "rope.dimension_count": s.head_dim,
        "rope.freq_base": s.theta,
        "vocab_size": s.vocab,
    }
    assert {k: found[f"llama.{k}"][1] for k in wanted} == wanted
    assert found["llama.attention.layer_norm_rms_epsilon"][1] == pytest.approx(s.eps)
    assert len(found["tokenizer.ggml.tokens"][1]) == s.vocab
    assert not any(k.startswith("llama.rope.scaling") or k == "llama.attention.sliding_window" for k in found)


@pytest.mark.parametrize("explicit", [True, False])
def test_a_head_dim_that_does_not_follow_from_the_width(tmp_path, explicit):
    from dataclasses import replace

    from tests.fixtures import SHAPES

    shape = replace(SHAPES["gqa8"], head_dim=16) if explicit else SHAPES["gqa8"]
    made = make_hf(tmp_path / "source", shape, config_style="v4")
    found = export(made.path, tmp_path / "a.gguf", tokenizer=False)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        assert found[f"llama.{key}"] == ("UINT32", 16 if explicit else 8)


def test_linear_scaling_is_two_keys_and_llama3_a_tensor(tmp_path):
    linear = {"rope_type": "linear", "factor": 4.0}
    made = make_hf(tmp_path / "linear", "gqa8", scaling=linear)
    found = export(made.path, tmp_path / "a.gguf", tokenizer=False)
    assert found["llama.rope.scaling.type"] == ("STRING", "linear")
    assert found["llama.rope.scaling.factor"] == ("FLOAT32", 4.0)
    made = make_hf(tmp_path / "llama3", "gqa8", scaling=8)
    found = export(made.path, tmp_path / "b.gguf", tokenizer=False)
    assert not any("rope.scaling" in k for k in found)
    assert json.loads(found["convert.rope_parameters"][1])["factor"] == 8


# ---- tokenizers ------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_looked_for_before_anything_else(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8")
    with pytest.raises(ConvertError) as caught:
        export(made.path, tmp_path / "a.gguf")
    assert caught.value.problems[0].kind == "tokenizer_missing" and "--no-tokenizer" in caught.value.problems[0].hint
    assert not list(tmp_path.glob("a.gguf*"))
    found = export(made.path, tmp_path / "a.gguf", tokenizer=False)
    assert found["tokenizer.ggml.model"][1] == "none" and found["llama.vocab_size"][1] == made.shape.vocab
    with pytest.raises(UsageError, match="no such file"):
        export(made.path, tmp_path / "b.gguf", tokenizer_path=tmp_path / "nothing")


def test_the_list_is_padded_to_the_rows_and_may_not_be_longer(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", tokenizer=120)
    found = export(made.path, tmp_path / "a.gguf")
    tokens, types = found["tokenizer.ggml.tokens"][1], found["tokenizer.ggml.token_type"][1]
    assert tokens[120:] == [f"[PAD{i}]" for i in range(120, 128)] and types[120:] == [5] * 8 and 5 not in types[:120]
    save_tokenizer(made.path, 140)
    with pytest.raises(ConvertError, match="140 tokens"):
        export(made.path, tmp_path / "b.gguf")


def test_every_end_of_text_and_the_chat_template(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", tokenizer=True)
    (made.path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7, 9], "temperature": 0.5}))
    (made.path / "chat_template.jinja").write_text("{{ messages }}")
    found = export(made.path, tmp_path / "a.gguf")
    assert found["tokenizer.ggml.eos_token_id"] == ("UINT32", 1)
    assert found["convert.eos_token_ids"][1] == [1, 7, 9]
    assert found["tokenizer.chat_template"] == ("STRING", "{{ messages }}")
    assert found["general.sampling.temp"] == ("FLOAT32", 0.5)


def test_a_meta_folder_brings_its_tokenizer_and_a_gguf_source_keeps_its_own(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "gqa8")
    found = export(made.path, tmp_path / "a.gguf")
    before = keys(made.path)
    assert all(found[k] == before[k] for k in before if k.startswith("tokenizer."))
    found = export(made.path, tmp_path / "b.gguf", tokenizer=False)
    assert [k for k in found if k.startswith("tokenizer.")] == ["tokenizer.ggml.model"]


# ---- what people read ------------------------------------------------------------------------------------------

CARD = """---
license: apache-2.0
license_link: "LICENSE.md"
language:
- en
- 'de'
tags: [llama, small]
base_model: somebody/Big-Model-7B # a comment
model-index:
  - name: nested
    results: []
pipeline_tag: text-generation
---
# A model
license: not this one
"""


def test_the_model_card(tmp_path):
    made = make_hf(tmp_path / "My-Model", "gqa8")
    (made.path / "README.md").write_text(CARD)
    found = export(made.path, tmp_path / "a.gguf", tokenizer=False)
    assert found["general.name"] == ("STRING", "My-Model")
    assert found["general.license"] == ("STRING", "apache-2.0")
    assert found["general.license.link"] == ("STRING", "LICENSE.md")
    assert found["general.languages"] == ("ARRAY:STRING", ["en", "de"])
    assert found["general.tags"] == ("ARRAY:STRING", ["llama", "small", "text-generation"])
    assert found["general.base_model.count"] == ("UINT32", 1)
    assert found["general.base_model.0.name"][1] == "Big-Model-7B"
    assert found["general.base_model.0.organization"][1] == "somebody"


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("Some-1B", "Some-1B"),
        ("Some-1B/original", "Some-1B"),
        ("Some-1B/hf", "Some-1B"),
        ("Some-1B/checkpoint-500", "Some-1B"),
        ("out/hf", "hf"),  # neither tells, and the nearer one it is
        ("models--me--Some-1B/snapshots/0123abc", "Some-1B"),
    ],
)
def test_names_of_folders(tmp_path, place, name):
    made = make_hf(tmp_path / place, "gqa8")
    assert export(made.path, tmp_path / "a.gguf", tokenizer=False)["general.name"][1] == name


def test_the_card_is_read_as_yaml_reads_it(tmp_path):
    yaml = pytest.importorskip("yaml")
    (tmp_path / "README.md").write_text(CARD)
    wanted = yaml.safe_load(CARD.split("---")[1])
    card = read_card(tmp_path)
    assert many(card, "language") == wanted["language"] and many(card, "tags") == wanted["tags"]
    for key in ("license", "license_link", "base_model", "pipeline_tag"):
        assert one(card, key) == wanted[key]


@pytest.mark.parametrize(
    "text",
    ["", "---\n", "---\nlicense: [\n---\n", "no front matter", "---\n\tx\n- y\n: z\n---", "---\nlicense:\n---\n"],
)
def test_optional_metadata_never_stops(tmp_path, text):
    made = make_hf(tmp_path / "source", "gqa8")
    (made.path / "README.md").write_text(text)
    (made.path / "generation_config.json").write_text("{not json")
    found = export(made.path, tmp_path / "a.gguf", tokenizer=False)
    assert "general.name" in found
    (made.path / "README.md").write_bytes(b"---\nlicense: \xff\xfe\n---")
    export(made.path, tmp_path / "b.gguf", tokenizer=False)


@pytest.mark.parametrize(
    ("count", "label"), [(134_515_008, "135M"), (1_235_814_400, "1.2B"), (70_553_706_496, "71B"), (43_000, "43K")]
)
def test_size_labels_are_those_of_the_package(count, label):
    assert size_label(count) == label
    assert gguf.size_label(count, 0, 0, 0) == label


def test_keys_of_the_user_are_typed(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8")
    wanted = {
        "author": "somebody",
        "general.version": "3",
        "general.tags": "a,b",
        "my.count": "5",
        "my.share": "0.25",
        "my.flag": "true",
        "my.wide": "u64:7",
        "my.list": ["x", "y"],
        "llama.context_length": "4096",
    }
    found = export(made.path, tmp_path / "a.gguf", tokenizer=False, metadata=wanted)
    assert found["general.author"] == ("STRING", "somebody") and found["general.version"] == ("STRING", "3")
    assert found["general.tags"] == ("ARRAY:STRING", ["a", "b"])
    assert found["my.count"] == ("UINT32", 5) and found["my.share"] == ("FLOAT32", 0.25)
    assert found["my.flag"] == ("BOOL", True) and found["my.wide"] == ("UINT64", 7)
    assert found["my.list"] == ("ARRAY:STRING", ["x", "y"])
    assert found["llama.context_length"] == ("UINT32", 4096)
    for key, value in (
        ("llama.context_length", "many"),
        ("general.architecture", "gpt2"),
        ("split.count", "3"),
        ("general.alignment", "64"),
        ("llama.block_count", "7"),
        ("llama.attention.head_count_kv", "u32:4"),
        ("convert.config", "{}"),
        ("my.large", "f64:1e400"),
        ("my.large", "f32:1e39"),
    ):
        with pytest.raises(UsageError, match=key):
            export(made.path, tmp_path / "b.gguf", tokenizer=False, metadata={key: value})
    export(
        made.path, tmp_path / "b.gguf", tokenizer=False, metadata={"llama.context_length": "64"}
    )  # no shape: anybody's
    assert keys(tmp_path / "b.gguf")["llama.context_length"] == ("UINT32", 64)


# ---- provenance, and the way back ------------------------------------------------------------------------------


def test_provenance(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", sharded=2)
    found = export(made.path, tmp_path / "a.gguf", tokenizer=False)
    files = sorted(made.path.glob("*.safetensors"))
    assert found["convert.source.files"][1] == [f.name for f in files]
    wanted = [hashlib.sha256(f.read_bytes()[: 1 << 20]).hexdigest() for f in files]
    assert found["convert.source.head_sha256"][1] == wanted
    assert found["convert.source.layout"][1] == "hf" and found["convert.tied"] == ("BOOL", False)
    assert found["convert.version"][1] == f"ckpt-convert {convert.__version__}"
    record = json.loads((tmp_path / "a.gguf.conversion.json").read_text())
    assert record["target"]["files"][0]["name"] == "a.gguf" and record["target"]["dtype"] == "f32"


def test_another_tools_edit_wins_over_the_record(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8")
    export(made.path, tmp_path / "a.gguf", tokenizer=False, metadata={"llama.context_length": "4096"})
    with convert.open_checkpoint(tmp_path / "a.gguf") as opened:
        assert opened.config["max_position_embeddings"] == 4096
        assert opened.config["hidden_act"] == "silu"  # the record has what GGUF has no key for
    export(made.path, tmp_path / "b.gguf", tokenizer=False)
    set_metadata(tmp_path / "b.gguf", {"convert.config": Str("{damaged")})
    with convert.open_checkpoint(tmp_path / "b.gguf") as opened:
        assert opened.config["max_position_embeddings"] == made.shape.context


def test_a_key_given_twice_is_a_question(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8")
    twice = {"author": "one", "general.author": "two"}
    with pytest.raises(UsageError, match=r"general\.author is given twice"):
        export(made.path, tmp_path / "a.gguf", tokenizer=False, metadata=twice)
    export(made.path, tmp_path / "a.gguf", tokenizer=False, metadata={"author": "one"})

    def run(*arguments: str) -> int:
        try:
            return main(["metadata", file, *arguments])
        except SystemExit as end:  # what the parser finds
            return int(end.code or 0)

    file = str(tmp_path / "a.gguf")
    before = Path(file).read_bytes()
    for more in (
        ["--set", "my.x=1", "--set", "my.x=2"],
        ["--set", "convert.config={}"],
        ["--set", "general.author=x", "--remove", "general.author"],
        ["--set", "my.x=f64:1e400"],
    ):
        assert run(*more) == 2, more
    assert Path(file).read_bytes() == before
    assert run("--set", "my.x=1", "--remove", "convert.config") == 0
    assert "convert.config" not in keys(Path(file)) and keys(Path(file))["my.x"] == ("UINT32", 1)


def test_infinity_only_where_it_is_written():
    assert infer("f64:inf").value == float("inf") and infer("f64:1e300").value == 1e300
    with pytest.raises(ValueError, match="too large for f64"):
        infer("f64:-1e400")


# ---- files of others -------------------------------------------------------------------------------------------


def rewritten(source: Path, out: Path, changes: dict[str, object], *, divisors: list[float] | None = None) -> Path:
    """A GGUF file with other key-values, and a tensor of divisors, written by the ``gguf`` package."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        kind = field.types[0] if field.types else None
        own = field.name.startswith(("GGUF.", "general.architecture", "convert."))
        if own or field.name in changes or kind == gguf.GGUFValueType.ARRAY:
            continue
        writer.add_key_value(field.name, field.contents(), kind)
    for key, value in changes.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    made = make_hf(folder / "source", "gqa8")
    convert.convert_checkpoint(made.path, folder / "a.gguf", to="gguf", type="f32", tokenizer=False)
    return folder / "a.gguf"


def test_an_array_of_equal_head_counts_is_that_count(foreign, tmp_path):
    key = "llama.attention.head_count_kv"
    same = rewritten(foreign, tmp_path / "same.gguf", {key: [2, 2], "llama.feed_forward_length": [96, 96]})
    with convert.open_checkpoint(same) as opened:
        assert opened.config["num_key_value_heads"] == 2 and opened.config["intermediate_size"] == 96
        assert not opened.match.problems
    assert convert.verify(foreign, same).verdict == "pass"
    unequal = rewritten(foreign, tmp_path / "unequal.gguf", {key: [2, 4]})
    with pytest.raises(ConvertError, match="num_key_value_heads"):  # layers of several kinds are no llama
        convert.open_checkpoint(unequal)


def test_divisors_of_one_scale_nothing(foreign, tmp_path):
    with convert.open_checkpoint(rewritten(foreign, tmp_path / "ones.gguf", {}, divisors=[1.0] * 4)) as opened:
        assert opened.config["rope_parameters"]["rope_type"] == "default" and not opened.match.problems
    convert.convert_checkpoint(tmp_path / "ones.gguf", tmp_path / "hf", to="hf", tokenizer=False)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (written.get("rope_parameters") or {"rope_type": "default"})["rope_type"] == "default"
    with pytest.raises(ConvertError, match="divisors"):  # control: others are read
        convert.open_checkpoint(rewritten(foreign, tmp_path / "odd.gguf", {}, divisors=[1.0, 3.0, 1.0, 2.0]))


def test_a_model_that_sees_what_follows_is_refused(foreign, tmp_path):
    with convert.open_checkpoint(rewritten(foreign, tmp_path / "c.gguf", {"llama.attention.causal": True})):
        pass
    with pytest.raises(ConvertError, match=r"attention\.causal is false"):
        convert.open_checkpoint(rewritten(foreign, tmp_path / "e.gguf", {"llama.attention.causal": False}))
