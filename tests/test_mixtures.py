"""The quantisation rules against what llama.cpp reports of files its own quantiser wrote, and against damage."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from convert.dtypes import DTYPES
from convert.errors import TableError, UsageError
from convert.formats.spec import Entry
from convert.mixture_table import FILE, read_tables, tables
from convert.mixtures import ModelFacts, TypeChoice, automatic, choose_types, mixture
from convert.resources import mappings_dir


def llama(
    layers: int, dim: int, ff: int, *, heads: int = 32, kv: int = 8, vocab: int = 512, tied: bool = False
) -> tuple[list[Entry], ModelFacts]:
    """The tensors of a Llama by GGUF names."""
    kv_dim = dim // heads * kv
    shapes = {
        "attn_q": (dim, dim),
        "attn_k": (kv_dim, dim),
        "attn_v": (kv_dim, dim),
        "attn_output": (dim, dim),
        "ffn_gate": (ff, dim),
        "ffn_up": (ff, dim),
        "ffn_down": (dim, ff),
        "attn_norm": (dim,),
        "ffn_norm": (dim,),
    }
    entries = [Entry("token_embd.weight", "BF16", (vocab, dim)), Entry("output_norm.weight", "BF16", (dim,))]
    if not tied:
        entries.append(Entry("output.weight", "BF16", (vocab, dim)))
    for layer in range(layers):
        entries += [Entry(f"blk.{layer}.{name}.weight", "BF16", shape) for name, shape in shapes.items()]
    return entries, ModelFacts(layers=layers, gqa=heads // kv)


def choose(name: str, model: tuple[list[Entry], ModelFacts], **options: object) -> dict[str, TypeChoice]:
    choices = choose_types(model[0], mixture(name), model[1], **options)  # type: ignore[arg-type]
    assert [c.name for c in choices] == [e.name for e in model[0]]
    return {c.name: c for c in choices}


def counted(choices: dict[str, TypeChoice]) -> dict[str, int]:
    return dict(Counter(c.dtype for c in choices.values()))


# What llama.cpp's loader printed ("- type q4_K: 193 tensors" …) in public bug reports about files of its quantiser:
# models of 32 layers, with 32 kv heads (Llama 2 7B) and 8 (Mistral 7B, Llama 3 8B).
PUBLISHED = [
    ("q4_k_m", 32, 32, {"F32": 65, "Q4_K": 193, "Q6_K": 33}),
    ("q4_k_m", 32, 8, {"F32": 65, "Q4_K": 193, "Q6_K": 33}),
    ("q5_k_m", 32, 8, {"F32": 65, "Q5_K": 193, "Q6_K": 33}),
    ("q3_k_m", 32, 8, {"F32": 65, "Q3_K": 129, "Q4_K": 92, "Q5_K": 4, "Q6_K": 1}),
    ("q3_k_l", 32, 8, {"F32": 65, "Q3_K": 129, "Q5_K": 96, "Q6_K": 1}),
    ("q4_0", 32, 32, {"F32": 65, "Q4_0": 225, "Q6_K": 1}),
]

# Counted by hand from the quantiser's source.
BY_HAND = [
    ("q4_k_s", 32, 8, {"F32": 65, "Q4_K": 217, "Q5_K": 8, "Q6_K": 1}),
    ("q5_k_s", 32, 8, {"F32": 65, "Q5_K": 225, "Q6_K": 1}),
    ("q6_k", 32, 8, {"F32": 65, "Q6_K": 226}),
    ("q8_0", 32, 8, {"F32": 65, "Q8_0": 226}),
    ("q4_k_m", 80, 8, {"F32": 161, "Q4_K": 441, "Q5_K": 40, "Q6_K": 81}),
]


@pytest.mark.parametrize(("name", "layers", "kv", "wanted"), PUBLISHED + BY_HAND)
def test_counts_are_those_of_llama_cpp(name: str, layers: int, kv: int, wanted: dict[str, int]) -> None:
    assert counted(choose(name, llama(layers, 4096, 14336, heads=32, kv=kv))) == wanted


def test_which_layers_get_more_bits() -> None:
    """The layers of Llama 3 8B in Q4_K_M files: the first and last eighth and every third between."""
    choices = choose("q4_k_m", llama(32, 4096, 14336))
    more = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
    for part in ("attn_v", "ffn_down"):
        assert {n for n in range(32) if choices[f"blk.{n}.{part}.weight"].dtype == "Q6_K"} == more
    assert choices["token_embd.weight"].dtype == "Q4_K" and choices["output.weight"].dtype == "Q6_K"
    assert choices["output.weight"].reason == "the rule for output" and choices["token_embd.weight"].reason == ""


def test_q2_k_looks_at_the_shared_heads() -> None:
    wanted = {4: "Q4_K", 1: "Q3_K"}
    for gqa, dtype in wanted.items():
        choices = choose("q2_k", llama(32, 4096, 14336, kv=32 // gqa))
        assert {choices[f"blk.{n}.attn_v.weight"].dtype for n in range(32)} == {dtype}
    assert counted(choose("q2_k", llama(32, 4096, 14336))) == {
        "F32": 65,
        "Q2_K": 129,
        "Q3_K": 64,
        "Q4_K": 32,
        "Q6_K": 1,
    }


def test_the_file_order_does_not_matter() -> None:
    entries, facts = llama(32, 4096, 14336)
    forward = choose("q4_k_s", (entries, facts))
    assert choose("q4_k_s", (entries[::-1], facts)) == forward
    assert {n for n in range(32) if forward[f"blk.{n}.attn_v.weight"].dtype == "Q5_K"} == {0, 1, 2, 3}


def test_a_tied_embedding_takes_the_place_of_the_head() -> None:
    assert choose("q4_k_m", llama(4, 512, 1024, tied=True))["token_embd.weight"].dtype == "Q6_K"
    assert choose("q4_k_m", llama(4, 512, 1024))["token_embd.weight"].dtype == "Q4_K"
    assert choose("q8_0", llama(4, 512, 1024, tied=True))["token_embd.weight"].dtype == "Q8_0"


def test_80_layers_without_shared_heads_are_not_the_70b() -> None:
    assert "Q5_K" not in counted(choose("q4_k_m", llama(80, 4096, 11008, kv=32)))


def test_experts_are_counted_by_their_layer() -> None:
    entries = [Entry(f"blk.{n}.ffn_down_exps.weight", "BF16", (4, 256, 512)) for n in range(16)]
    entries += [Entry(f"blk.{n}.ffn_gate_inp.weight", "BF16", (4, 256)) for n in range(16)]
    choices = choose("q4_k_m", (entries, ModelFacts(layers=16, gqa=4, experts=4)))
    assert {n for n in range(16) if choices[f"blk.{n}.ffn_down_exps.weight"].dtype == "Q6_K"} == {
        0,
        1,
        4,
        7,
        10,
        13,
        14,
        15,
    }
    assert choices["blk.0.ffn_gate_inp.weight"].dtype == "F32"
    eight = llama(16, 512, 1024)
    choices = choose("q4_k_m", (eight[0], ModelFacts(layers=16, gqa=4, experts=8)))
    found = {part: choices[f"blk.5.{part}.weight"].dtype for part in ("attn_v", "attn_k", "attn_output", "attn_q")}
    assert found == {"attn_v": "Q8_0", "attn_k": "Q8_0", "attn_output": "Q5_K", "attn_q": "Q4_K"}


def test_a_fused_projection_counts_as_values() -> None:
    entries = [Entry(f"blk.{n}.attn_qkv.weight", "F32", (768, 256)) for n in range(16)]
    choices = choose("q4_k_m", (entries, ModelFacts(layers=16)))
    assert [choices[e.name].dtype for e in entries[:5]] == ["Q6_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K"]


@pytest.mark.parametrize(
    ("entry", "dtype"),
    [
        (Entry("blk.0.attn_norm.weight", "BF16", (256,)), "F32"),
        (Entry("blk.0.attn_q_norm.weight", "BF16", (4, 256)), "F32"),
        (Entry("blk.0.attn_q.bias", "BF16", (256,)), "F32"),
        (Entry("blk.0.ssm_a", "BF16", (16,)), "F32"),
        (Entry("blk.0.ssm_conv1d.weight", "BF16", (512, 4)), "F32"),
        (Entry("blk.0.ffn_down_exps.scale", "BF16", (8, 256)), "F32"),
        (Entry("blk.0.ffn_gate_inp.weight", "BF16", (8, 256)), "F32"),
        (Entry("position_embd.weight", "BF16", (128, 256)), "F32"),
        (Entry("rope_freqs.weight", "F32", (32,)), "F32"),
        (Entry("blk.0.one_row.weight", "BF16", (1, 256)), "F32"),
        (Entry("per_layer_model_proj.weight", "BF16", (512, 256)), "BF16"),
        (Entry("blk.0.attn_q.weight", "BF16", (256, 256)), "Q4_K"),
    ],
)
def test_what_is_never_quantised(entry: Entry, dtype: str) -> None:
    assert choose("q4_k_m", ([entry], ModelFacts(layers=1)), wide="BF16")[entry.name].dtype == dtype


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_plain_types(name: str) -> None:
    choices = choose(name, llama(2, 48, 80))
    assert counted(choices) == ({"F32": 21} if name == "f32" else {"F32": 5, name.upper(): 16})
    assert choices["blk.0.attn_q.weight"].dtype == name.upper() and choices["blk.0.attn_norm.weight"].dtype == "F32"
    assert not any(c.fallback_from for c in choices.values())


def test_rows_that_do_not_fit_fall_back_at_a_stated_price() -> None:
    """576 columns (SmolLM2 135M) are whole blocks of 32 and not of 256."""
    entries, facts = llama(30, 576, 1536, heads=9, kv=3, vocab=49152, tied=True)
    choices = choose("q4_k_m", (entries, facts))
    assert choices["blk.5.attn_q.weight"].dtype == "Q5_0" and choices["blk.5.attn_q.weight"].fallback_from == "Q4_K"
    assert choices["blk.0.attn_v.weight"].dtype == "Q8_0" and choices["blk.0.attn_v.weight"].fallback_from == "Q6_K"
    assert choices["blk.0.ffn_down.weight"] == TypeChoice(
        "blk.0.ffn_down.weight", "Q6_K", reason="the rule for ffn_down"
    )
    head = choices["token_embd.weight"]
    assert (head.dtype, head.fallback_from) == ("Q8_0", "Q6_K") and "576" in head.reason
    assert head.extra_bytes == 49152 * 576 * 34 // 32 - 49152 * 576 * 210 // 256
    # Its published Q4_1 file has the head in Q8_0 for the same reason.
    assert choose("q4_1", (entries, facts))["token_embd.weight"].dtype == "Q8_0"
    assert choose("q2_k", (entries, facts))["blk.5.attn_q.weight"].dtype == "Q4_0"
    assert choose("q5_k_s", (entries, facts))["blk.5.attn_q.weight"].dtype == "Q5_1"


def test_rows_of_48_columns_stay_float16() -> None:
    choices = choose("q8_0", llama(2, 48, 64, heads=4, kv=2))
    found = choices["blk.0.attn_q.weight"]
    assert (found.dtype, found.fallback_from, found.extra_bytes) == ("F16", "Q8_0", 48 * 48 * 2 - 48 * 48 * 34 // 32)
    assert choices["blk.0.ffn_down.weight"].dtype == "Q8_0"
    assert choose("q4_k_m", llama(2, 48, 64, heads=4, kv=2))["output.weight"].dtype == "F16"


def test_without_ggml_the_head_falls_back_and_k_types_are_refused() -> None:
    writable = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})
    head = choose("q4_0", llama(2, 512, 1024), writable=writable)["output.weight"]
    assert (head.dtype, head.fallback_from) == ("Q8_0", "Q6_K") and "quantize" in head.reason and head.extra_bytes > 0
    with pytest.raises(UsageError, match="extra: quantize"):
        choose("q4_k_m", llama(2, 512, 1024), writable=writable)


def test_overrides() -> None:
    model = llama(4, 512, 1024)
    choices = choose("q4_k_m", model, overrides=[("blk.*.ffn_down.weight", "q8_0"), ("blk.1.*down*", "F16")])
    assert [choices[f"blk.{n}.ffn_down.weight"].dtype for n in range(4)] == ["Q8_0", "F16", "Q8_0", "Q8_0"]
    assert choices["blk.0.ffn_down.weight"].reason == "--tensor-type"
    narrow = choose("q8_0", llama(4, 576, 1024), overrides=[("*attn_q.weight", "q6_k")])["blk.0.attn_q.weight"]
    assert (narrow.dtype, narrow.fallback_from) == ("Q8_0", "Q6_K")


def test_wrong_overrides_are_all_told() -> None:
    overrides = [("nothing*", "q8_0"), ("*attn_q*", "iq4_xs"), ("*attn_q*", "q9"), ("blk.0.attn_norm*", "q8_0")]
    with pytest.raises(UsageError) as caught:
        choose("q4_k_m", llama(1, 512, 1024), overrides=overrides)
    messages = [p.message for p in caught.value.problems]
    assert len(messages) == 4
    for part, message in zip(
        ["fits no tensor", "importance", "not a tensor type", "blk.0.attn_norm"], messages, strict=True
    ):
        assert part in message


def test_names_of_types() -> None:
    assert mixture("Q4_K").name == "q4_k_m" and mixture("Q6_K").name == "q6_k" and mixture("float16").name == "f16"
    for name in ("iq2_xxs", "IQ4_XS", "q2_k_s"):
        with pytest.raises(UsageError, match="importance matrix"):
            mixture(name)
    with pytest.raises(UsageError, match=r"Types: f32, f16, bf16, q8_0"):
        mixture("q7_k")
    assert (
        automatic({"BF16": 10, "F32": 100}) == "bf16"
        and automatic({"F16": 10}) == "f16"
        and automatic({"F32": 1}) == "f16"
    )


def test_file_types_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for name, found in tables().mixtures.items():
        wanted = {"f32": "ALL_F32", "q3_k_s": "MOSTLY_Q3_K_S"}.get(name, f"MOSTLY_{name.upper()}")
        assert gguf.LlamaFileType[wanted].value == found.file_type, name
        assert found.base in DTYPES


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('base = "Q4_K"', 'base = "Q4_Z"', "'Q4_Z' is not a type"),
        ('role = "ffn_down", when = "first_eighth"', 'role = "ffn_dawn", when = "first_eighth"', "no role 'ffn_dawn'"),
        ('when = "i < 4"', 'when = "j < 4"', "unknown name 'j'"),
        ('when = "i < 4"', 'when = "open(i)"', "not allowed"),
        ("file_type = 15", "file_typ = 15", "unknown key 'file_typ'"),
        ("[fallback]", "[fallbacks]", "unknown key 'fallbacks'"),
        ('extends = "k"', 'extends = "q"', "no [shared.q]"),
        ('q4_k = "q4_k_m"', 'q4_k = "q4_k_x"', "no type 'q4_k_x'"),
        ("[keep]", "[keep", "quantization.toml"),
    ],
)
def test_a_damaged_rules_file_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = (mappings_dir() / FILE).read_text(encoding="utf-8")
    path = tmp_path / FILE
    path.write_text(text, encoding="utf-8")
    assert read_tables(path).mixtures.keys() == tables().mixtures.keys()
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(TableError) as caught:
        read_tables(path)
    assert words in str(caught.value)
