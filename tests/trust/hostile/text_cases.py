# ruff: noqa: E501 (tables of inputs: one to a line)
"""Configs and tokenizers of every spelling that say what cannot be."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.trust.hostile import base
from tests.trust.hostile.harness import Case
from tests.trust.hostile.sparse import hole


def _but(**more: Any) -> dict[str, Any]:
    return {**base.CONFIG, **more}


_TEXT = json.dumps(base.CONFIG)
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, Any] = {
    "10^9 layers": _but(num_hidden_layers=10**9),
    "10^18 layers": _but(num_hidden_layers=10**18),
    "layers of 10^400": _but(num_hidden_layers=10**400),
    "layers of 5,000 digits": _TEXT.replace('"num_hidden_layers": 1', '"num_hidden_layers": ' + "9" * 5000).encode(),
    "layers of NaN": _but(num_hidden_layers=float("nan")),
    "layers of infinity": _but(num_hidden_layers=float("inf")),
    "layers of true": _but(num_hidden_layers=True),
    "layers of 1.5": _but(num_hidden_layers=1.5),
    "layers as a text": _but(num_hidden_layers="1"),
    "negative layers": _but(num_hidden_layers=-1),
    "layers as a list": _but(num_hidden_layers=[1]),
    "heads of zero": _but(num_attention_heads=0),
    "heads of 2^40": _but(num_attention_heads=2**40),
    "negative heads": _but(num_attention_heads=-4),
    "K/V heads of zero": _but(num_key_value_heads=0),
    "hidden size of 2^62": _but(hidden_size=2**62),
    "hidden size as an object": _but(hidden_size={"a": 1}),
    "vocabulary of 10^12": _but(vocab_size=10**12),
    "vocabulary of -5": _but(vocab_size=-5),
    "head_dim of 0": _but(head_dim=0),
    "head_dim of 3": _but(head_dim=3),
    "epsilon of NaN": _but(rms_norm_eps=float("nan")),
    "epsilon as a text": _but(rms_norm_eps="x"),
    "theta of NaN": _but(rope_theta=float("nan")),
    "theta of 0": _but(rope_theta=0),
    "theta of 10^400": _but(rope_theta=10**400),
    "scaling as a list": _but(rope_scaling=[1]),
    "scaling as a text": _but(rope_scaling="llama3"),
    "scaling of NaN": _but(rope_scaling={"rope_type": "linear", "factor": float("nan")}),
    "scaling of 10^400": _but(rope_scaling={"rope_type": "linear", "factor": 10**400}),
    "scaling of an unknown kind": _but(rope_scaling={"rope_type": "evil", "factor": 2}),
    "scaling by a list of 10^5": _but(rope_scaling={"rope_type": "longrope", "short_factor": [1] * 10**5, "long_factor": [1] * 10**5}),
    "context of NaN": _but(max_position_embeddings=float("nan")),
    "tied as a text": _but(tie_word_embeddings="false"),
    "a type that is a list": _but(model_type=["llama"]),
    "a type that is a number": _but(model_type=5),
    "a type with terminal codes": _but(model_type="\x1b[2J", architectures=["\x1b[2J"]),
    "architectures as a text": _but(architectures="LlamaForCausalLM"),
    "architectures of numbers": _but(architectures=[5]),
    "code to be trusted": _but(model_type="evil", architectures=["Evil"], auto_map={"AutoModel": "evil.Evil"}),
    "a class of Python": _but(model_type="os.system", architectures=["os.system"]),
    "quantised as a list": _but(quantization_config=[5]),
    "quantised by an unknown method": _but(quantization_config={"quant_method": "\x1b[2J"}),
    "sliding window as a text": _but(sliding_window="x", layer_types=5),
    "a type of torch as a path": _but(torch_dtype="../x"),
    "epsilon of 0": _but(rms_norm_eps=0),
    "epsilon of -1": _but(rms_norm_eps=-1.0),
    "epsilon of 10^9": _but(rms_norm_eps=1e9),
    "theta of true": _but(rope_theta=True),
    "theta of -1": _but(rope_theta=-1.0),
    "theta of 0 in both spellings": _but(rope_theta=0, rope_parameters={"rope_type": "default", "rope_theta": 0}),
    "layers of zero": _but(num_hidden_layers=0),
    "heads of true": _but(num_attention_heads=True),
    "heads of 4.0": _but(num_attention_heads=4.0),
    "K/V heads of three": _but(num_key_value_heads=3),
    "K/V heads as a text": _but(num_key_value_heads="2"),
    "K/V heads of more than heads": _but(num_key_value_heads=8),
    "hidden size of 0": _but(hidden_size=0),
    "hidden size of 32.0": _but(hidden_size=32.0),
    "width of 0": _but(intermediate_size=0),
    "width as a list": _but(intermediate_size=[48]),
    "vocabulary of 0": _but(vocab_size=0),
    "vocabulary of -1": _but(vocab_size=-1),
    "head_dim of -8": _but(head_dim=-8),
    "head_dim of true": _but(head_dim=True),
    "head_dim as a text": _but(head_dim="8"),
    "context of 0": _but(max_position_embeddings=0),
    "context of -1": _but(max_position_embeddings=-1),
    "context of 64.0": _but(max_position_embeddings=64.0),
    "window of 0": _but(sliding_window=0),
    "window of -1": _but(sliding_window=-1),
    "window of true": _but(sliding_window=True),
    "scaling by 0": _but(rope_scaling={"rope_type": "linear", "factor": 0}),
    "scaling by -2": _but(rope_scaling={"rope_type": "linear", "factor": -2.0}),
    "scaling by a text": _but(rope_scaling={"rope_type": "linear", "factor": "2"}),
    "scaling by true": _but(rope_scaling={"rope_type": "linear", "factor": True}),
    "llama3 with factors the wrong way round": _but(rope_scaling=_LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}),
    "llama3 with equal factors": _but(rope_scaling=_LLAMA3 | {"low_freq_factor": 4.0}),
    "llama3 of no length": _but(rope_scaling=_LLAMA3 | {"original_max_position_embeddings": 0.5}),
    "yarn with betas the wrong way round": _but(rope_scaling=_YARN | {"beta_fast": 1.0, "beta_slow": 32.0}),
    "yarn over a base of 1": _but(rope_scaling=_YARN, rope_theta=1),
    "yarn of no length": _but(rope_scaling=_YARN | {"original_max_position_embeddings": 0.5}),
    "scaling of proportions above 1": _but(rope_scaling={"rope_type": "proportional", "partial_rotary_factor": 2.0}),
    "longrope with too few": _but(rope_scaling={"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}),
    "bias as a text": _but(attention_bias="false"),
    "bias of 2": _but(attention_bias=2),
    "tied as a list": _but(tie_word_embeddings=[]),
    "quantised as an empty list": _but(quantization_config=[]),
    "quantised by 0": _but(quantization_config=0),
    "quantised by MLX as a list": _but(quantization=[4]),
    "a type of torch that is a number": _but(torch_dtype=32),
    "a type of tensors that is a list": _but(dtype=["float32"]),
    "a key twice in an object": _TEXT.replace('"rope_theta": 10000.0', '"rope_scaling": {"rope_type": "linear", "factor": 2, "factor": 4}').encode(),
    "a key thrice": _TEXT.replace('"hidden_size"', '"vocab_size": 40, "vocab_size": 7, "hidden_size"').encode(),
    "a key twice, as a number and as true": _TEXT.replace('"num_hidden_layers": 1', '"num_hidden_layers": 1, "num_hidden_layers": true').encode(),
    "UTF-16 of the other order": b"\xfe\xff" + _TEXT.encode("utf-16-be"),
    "UTF-32": _TEXT.encode("utf-32"),
    "a list": [],
    "a number": 5,
    "nothing": b"",
    "null": b"null",
    "an empty object": {},
    "an object in an object": {"text_config": {"text_config": {"text_config": 5}}},
    "deep lists": b'{"a":' + b"[" * 20_000_000,
    "deep objects": b'{"a":' * 2_000_000,
    "deep objects under text_config": b'{"text_config":' * 900 + b"5" + b"}" * 900,
    "no UTF-8": b'{"a":"\xff\xfe"}',
    "UTF-16": _TEXT.encode("utf-16"),
    "half a surrogate": b'{"model_type":"\\ud800","hidden_size":32}',
    "a key twice": _TEXT.replace('"hidden_size"', '"vocab_size": 7, "hidden_size"').encode(),
    "30 MB of lists": b'{"a":[' + b"[]," * 10_000_000 + b"[]]}",
    "30 MB of keys": b"{" + b",".join(b'"%07d":5' % i for i in range(2_500_000)) + b"}",
    "30 MB of numbers": b'{"a":[' + b"1," * 15_000_000 + b"1]}",
    "a web page": b"<!DOCTYPE html><html><title>\x1b[2JLogin</title>",
}  # fmt: skip
META: dict[str, Any] = {
    "10^9 layers": {"n_layers": 10**9},
    "layers of NaN": {"n_layers": float("nan")},
    "layers as a text": {"n_layers": "1"},
    "heads of 0": {"n_heads": 0},
    "negative heads": {"n_heads": -1},
    "multiple_of of 0": {"multiple_of": 0},
    "multiple_of of 10^18": {"multiple_of": 10**18},
    "a multiplier of infinity": {"ffn_dim_multiplier": float("inf")},
    "a multiplier as a list": {"ffn_dim_multiplier": [1]},
    "multiple_of of 16.0": {"multiple_of": 16.0},
    "multiple_of of true": {"multiple_of": True},
    "multiple_of as a text": {"multiple_of": "16"},
    "a multiplier of 0": {"ffn_dim_multiplier": 0},
    "a multiplier of NaN": {"ffn_dim_multiplier": float("nan")},
    "a multiplier of -1": {"ffn_dim_multiplier": -1.0},
    "scaled rope of 5": {"use_scaled_rope": 5},
    "scaled rope as a list": {"use_scaled_rope": []},
    "length of 0": {"max_seq_len": 0},
    "layers of true": {"n_layers": True},
    "layers of 0": {"n_layers": 0},
    "heads of 4.0": {"n_heads": 4.0},
    "K/V heads of three": {"n_kv_heads": 3},
    "theta of 0": {"rope_theta": 0},
    "epsilon of 0": {"norm_eps": 0},
    "a vocabulary of 0": {"vocab_size": 0},
    "a vocabulary of -2": {"vocab_size": -2},
    "dim of 2^62": {"dim": 2**62},
    "dim as a list": {"dim": [32]},
    "a vocabulary of 10^12": {"vocab_size": 10**12},
    "scaled rope as a text": {"use_scaled_rope": "yes"},
    "theta as a text": {"rope_theta": "x"},
    "epsilon as an object": {"norm_eps": {}},
}
_META = {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16, "norm_eps": 1e-5, "vocab_size": 40}
_META_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.0.self_attn.q_proj.weight": "layers.0.attention.wq.weight",
    "model.layers.0.self_attn.k_proj.weight": "layers.0.attention.wk.weight",
    "model.layers.0.self_attn.v_proj.weight": "layers.0.attention.wv.weight",
    "model.layers.0.self_attn.o_proj.weight": "layers.0.attention.wo.weight",
    "model.layers.0.mlp.gate_proj.weight": "layers.0.feed_forward.w1.weight",
    "model.layers.0.mlp.up_proj.weight": "layers.0.feed_forward.w3.weight",
    "model.layers.0.mlp.down_proj.weight": "layers.0.feed_forward.w2.weight",
    "model.layers.0.input_layernorm.weight": "layers.0.attention_norm.weight",
    "model.layers.0.post_attention_layernorm.weight": "layers.0.ffn_norm.weight",
}


def _meta(folder: Path, params: Any) -> Path:
    items = b"".join(base.text(_META_NAMES[n]) + base.tensor(str(i), s) for i, (n, s) in enumerate(base.SHAPES.items()))
    (folder / "consolidated.00.pth").write_bytes(base.archive(b"\x80\x02}(" + items + b"u."))
    (folder / "params.json").write_text(json.dumps(params))
    return folder


#: A sound byte-level BPE of as many tokens as the embedding has rows: digits, a letter, and what merges make of them.
_DIGITS = [str(i) for i in range(10)]
_MERGES = [f"t {d}" for d in _DIGITS] + [f"1 {d}" for d in _DIGITS] + [f"2 {d}" for d in _DIGITS[: base.VOCAB - 31]]
_VOCABULARY = {text: i for i, text in enumerate(["t", *_DIGITS, *(m.replace(" ", "") for m in _MERGES)])}
_STEP = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _bpe(**more: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": _VOCABULARY, "merges": _MERGES}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": _STEP, "decoder": _STEP, "model": model, **more}


def _model(**more: Any) -> dict[str, Any]:
    return _bpe(model={"type": "BPE", "vocab": _VOCABULARY, "merges": _MERGES, **more})


#: What the hostile ones are made from passes every command: they are refused for what is wrong with them.
SOUND = _bpe()
TOKENIZERS: dict[str, Any] = {
    "deep lists": b'{"model":' + b"[" * 2_000_000,
    "deep objects": b'{"model":' * 1_000_000,
    "deep pre-tokenizers": b'{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"decoder":{"type":"ByteLevel"},"pre_tokenizer":' + b'{"type":"Sequence","pretokenizers":[' * 400 + b"]}" * 400 + b"}",
    "no JSON": b"{" + b"x" * 1000,
    "a vocabulary that is a list": _model(vocab=["a"], merges=[]),
    "a vocabulary that is a number": _model(vocab=5, merges=[]),
    "ids that are texts": _model(vocab={"a": "b"}, merges=[]),
    "ids that are negative": _model(vocab={"a": -1}, merges=[]),
    "ids of 10^12": _model(vocab={"a": 10**12}, merges=[]),
    "ids of 10^400": _model(vocab={"a": 10**400}, merges=[]),
    "ids that are lists": _model(vocab={"a": [1]}, merges=[]),
    "ids of true": _model(vocab={"a": True}, merges=[]),
    "an id twice": _model(vocab={"a": 0, "b": 0}, merges=[]),
    "merges of three": _model(merges=["a b c"]),
    "merges of numbers": _model(merges=[5, 6]),
    "ids beyond the rows": _model(vocab={**_VOCABULARY, "tt": base.VOCAB}),
    "one id beyond the rest": _model(vocab={**_VOCABULARY, "tt": 10**9}),
    "merges of unknown pieces": _model(merges=["x y"] * 100),
    "merges that are an object": _model(merges={"a": "b"}),
    "merges that are a number": _model(merges=10**7),
    "a million merges": _model(merges=["t 1"] * 1_000_000),
    "an added token of 10^9": _bpe(added_tokens=[{"id": 10**9, "content": "x", "special": True}]),
    "an added token that is negative": _bpe(added_tokens=[{"id": -1, "content": "x", "special": True}]),
    "an added token of numbers": _bpe(added_tokens=[{"id": "x", "content": 5}]),
    "added tokens that are texts": _bpe(added_tokens=["x"]),
    "added tokens that are a number": _bpe(added_tokens=5),
    "a model that is a list": _bpe(model=[]),
    "a model of an unknown kind": _bpe(model={"type": "Evil", "vocab": {}}),
    "a unigram of numbers": _bpe(model={"type": "Unigram", "vocab": [5, 6]}),
    "a unigram of NaN": _bpe(model={"type": "Unigram", "unk_id": 0, "vocab": [["a", float("nan")]] * 40}),
    "a unigram whose unknown is 10^9": _bpe(model={"type": "Unigram", "unk_id": 10**9, "vocab": [["a", 0.0]]}),
    "a charsmap that is no base64": _bpe(normalizer={"type": "Precompiled", "precompiled_charsmap": "!!!"}),
    "a normaliser that is a list": _bpe(normalizer=[]),
    "a pre-tokenizer that is a number": _bpe(pre_tokenizer=5),
    "a regular expression that explodes": _bpe(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
    "a template of numbers": _bpe(post_processor={"type": "TemplateProcessing", "single": [5], "special_tokens": 7}),
    "half a surrogate": b'{"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"\\ud800":0},"merges":[]}}',
    "half a surrogate as an added token": _bpe(added_tokens=[{"id": 39, "content": "\ud800", "special": True}]),
    "a text of 60 MB": b'{"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"' + b"a" * (60 << 20) + b'":0},"merges":[]}}',
    "30 MB of lists": b'{"model":{"type":"BPE","vocab":{"a":0},"merges":[' + b"[]," * 10_000_000 + b"[]]}}",
    "30 MB of small merges": b'{"model":{"type":"BPE","vocab":{"a":0},"merges":[' + b'"",' * 10_000_000 + b'""]}}',
    "60 MB with an emoji": b'{"model":{"type":"BPE","vocab":{"' + b"a" * (60 << 20) + "\U0001f600".encode() + b'":0},"merges":[]}}',
    "a web page": b"<!DOCTYPE html><html><title>\x1b[2JLogin</title>",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "nothing": b"",
    "terminal codes": _model(vocab={"\x1b[2J": 0}, merges=["\x1b[2J x"]),
}  # fmt: skip
MODELS: dict[str, bytes] = {
    "garbage": bytes(range(256)) * 40,
    "a field of 2^63": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7fabc",
    "a number without end": b"\x0a" + b"\xff" * 1000,
    "pieces of numbers": b"\x08\x05" * 10_000,
    "nested messages": b"\x0a\x7f" * 50_000,
    "a million empty pieces": b"\x0a\x00" * 1_000_000,
    "a piece that is no UTF-8": b"\x0a\x04\x0a\x02\xff\xfe" * 100,
    "a trainer that is a number": b"\x0a\x03\x0a\x01a\x10\x05\x18\x05",
    "base64 of nothing": b"!!! 5\n" * 1000,
    "base64 with ranks that are texts": base64.b64encode(b"a") + b" x\n",
    "ranks of 10^12": base64.b64encode(b"a") + b" 1000000000000\n",
    "a rank of 5,000 digits": base64.b64encode(b"a") + b" " + b"9" * 5000 + b"\n",
    "a rank twice": (base64.b64encode(b"a") + b" 0\n" + base64.b64encode(b"b") + b" 0\n") * 10,
    "a megabyte in one token": base64.b64encode(b"a" * 1_000_000) + b" 0\n",
    "a million ranks": b"".join(base64.b64encode(b"%07d" % i) + b" %d\n" % i for i in range(1_000_000)),
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
}


#: What of tokenizer files never is read: these commands are about the weights, or were told so (--no-tokenizer).
_NEVER_READ = {"inspect", "diff", "diagnose", "to-gguf"}
#: Conversions that take tokenizer files along as they are: bytes in, bytes out, whatever the JSON says.
_CARRIED = {"to-scratch", "to-hf"}
#: But none takes along what is no such file at all.
_NO_FILES = {"deep lists", "deep objects", "no JSON", "a web page", "a pointer", "nothing"}
#: Sound files, as ``tokenizers`` says, too; and where llama.cpp cannot have them all the same, nothing more than that.
_SOUND = {
    "a regular expression that explodes": {"validate", "scan"},  # nobody runs it here; its rules are not llama.cpp's
    "a million merges": {"validate", "scan", "to-gguf-vocabulary"},  # one merge a million times changes nothing
}
_TOKEN = {"content": "x", "special": True}
_BEYOND: dict[str, Any] = {
    "tokenizer_config.json": {"added_tokens_decoder": {"1000000": _TOKEN}},
    "special_tokens_map.json": {"bos_token": "x"},
    "generation_config.json": {"eos_token_id": [2, base.VOCAB]},
    "added_tokens.json": {"x": 1000000},
}


def _texts(*values: str | bytes) -> bytes:
    return struct.pack("<IQ", 8, len(values)) + b"".join(map(base.string, values))


#: Key-values of a GGUF file: name, type, bytes.
_G = "tokenizer.ggml."
GGUF: dict[str, tuple[str, int, bytes]] = {
    "tokens that are a number": (_G + "tokens", 4, struct.pack("<I", 5)),
    "tokens that are a text": (_G + "tokens", 8, base.string("x" * base.VOCAB)),
    "no tokens": (_G + "tokens", 9, _texts()),
    "more tokens than rows": (_G + "tokens", 9, _texts(*(f"t{i}" for i in range(base.VOCAB + 1)))),
    "a token twice": (_G + "tokens", 9, _texts(*["t"] * base.VOCAB)),
    "tokens that are no UTF-8": (_G + "tokens", 9, _texts(*(b"\xff%d" % i for i in range(base.VOCAB)))),
    "tokens that are lists": (_G + "tokens", 9, struct.pack("<IQ", 9, base.VOCAB) + struct.pack("<IQ", 4, 0) * base.VOCAB),
    "types too few": (_G + "token_type", 9, struct.pack("<IQi", 5, 1, 1)),
    "types that are a number": (_G + "token_type", 4, struct.pack("<I", 5)),
    "merges that are a number": (_G + "merges", 4, struct.pack("<I", 5)),
    "merges of one": (_G + "merges", 9, _texts("t1")),
    "a million merges of one": (_G + "merges", 9, _texts(*["t"] * 1_000_000)),
    "an end beyond the rows": (_G + "eos_token_id", 4, struct.pack("<I", base.VOCAB)),
    "an end that is a text": (_G + "eos_token_id", 8, base.string("2")),
    "an end of NaN": (_G + "eos_token_id", 6, struct.pack("<f", float("nan"))),
    "a model that is a number": (_G + "model", 4, struct.pack("<I", 5)),
    "a template that is no UTF-8": ("tokenizer.chat_template", 8, base.string(b"\xff\xfe")),
    "a template that is a number": ("tokenizer.chat_template", 4, struct.pack("<I", 5)),
}  # fmt: skip


def _gguf(key: str, kind: int, raw: bytes) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        path = folder / "m.gguf"
        others = [value for value in base.gguf_values() if not value.startswith(base.string(key))]
        path.write_bytes(base.gguf([*others, base.keyed(key, kind, raw)]))
        return path

    return build


def _with_file(name: str, content: Any) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        base.hf(folder)
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return folder

    return build


def cases() -> Iterator[Case]:
    """Every config and tokenizer."""
    ways = ("inspect", "validate", "to-scratch", "to-gguf")
    for name, config in CONFIGS.items():
        passes = frozenset(("inspect",))
        yield Case(f"config: {name}", lambda f, config=config: base.hf(f, config=config), ways, passes)  # type: ignore[misc]
    blanks = _TEXT[:-1].encode()
    yield Case(
        "config: 1 GB of nesting", lambda f: hole(base.hf(f) / "config.json", 1 << 30, b"[" * 100_000) and f, ways
    )
    yield Case("config: 1 GB", lambda f: hole(base.hf(f) / "config.json", 1 << 30, blanks, b"}") and f, ways)
    for name, params in META.items():
        yield Case(f"params: {name}", lambda f, params=params: _meta(f, {**_META, **params}), ("inspect", "validate", "to-hf"), frozenset(("inspect",)))  # type: ignore[misc]  # fmt: skip
    ways = ("inspect", "validate", "scan", "to-scratch", "to-hf", "to-gguf-vocabulary")
    for name, content in TOKENIZERS.items():
        passes = _NEVER_READ | (_CARRIED if name not in _NO_FILES else set()) | _SOUND.get(name, set())
        yield Case(f"tokenizer.json: {name}", _with_file("tokenizer.json", content), ways, frozenset(passes))
    for name, raw in MODELS.items():
        # A folder for Hugging Face gets a tokenizer.json that is made from it.
        passes = _NEVER_READ | ({"to-scratch"} if name not in _NO_FILES else set())
        yield Case(f"tokenizer.model: {name}", _with_file("tokenizer.model", raw), ways, frozenset(passes))
    for name, value in (
        ("a number", 5),
        ("deep lists", b"[" * 1_000_000),
        ("a list", []),
        ("tokens of numbers", {"bos_token": 5, "bos_token_id": "5", "added_tokens_decoder": [5]}),
        ("ids beyond the rows", _BEYOND),
        ("no UTF-8", b"\xff"),
    ):
        for file in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "added_tokens.json"):

            def build(folder: Path, file: str = file, value: Any = value) -> Path:
                _with_file("tokenizer.json", SOUND)(folder)
                value = value[file] if value is _BEYOND else value
                (folder / file).write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
                return folder

            carried = name in ("tokens of numbers", "ids beyond the rows")
            passes = _NEVER_READ | (_CARRIED if carried else set())
            if (name, file) == ("ids beyond the rows", "special_tokens_map.json"):
                passes |= {*ways}  # it has no ids: what it holds is a text that transformers would add
            yield Case(f"{file}: {name}", build, ways, frozenset(passes))
    for name, keyed in GGUF.items():
        # Layouts that have no place for a tokenizer say in a note that there is none; GGUF takes the keys as they are.
        passes = {*_NEVER_READ, "to-scratch", "check"}
        yield Case(f"gguf tokenizer: {name}", _gguf(*keyed), ("inspect", "validate", "scan", "to-scratch", "to-hf", "to-gguf"), frozenset(passes))  # fmt: skip
    for file in (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ):

        def huge(folder: Path, file: str = file) -> Path:
            _with_file("tokenizer.json", SOUND)(folder)
            (folder / file).unlink(missing_ok=True)
            hole(folder / file, 1 << 30, b"{")
            return folder

        yield Case(f"{file}: 1 GB", huge, ways, frozenset(_NEVER_READ))
