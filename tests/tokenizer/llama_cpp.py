"""Real llama.cpp as the oracle for token ids: a GGUF file with a one-layer model, tokenised in a subprocess.

llama.cpp aborts the whole process on a file it does not like, so it never runs inside pytest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from convert.formats.gguf_values import Value

_SCRIPT = """
import json, sys, urllib.request
import xllamacpp
request = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path = request["path"]
params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers, params.verbosity = 64, 1, False, 0, 0
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
def post(path, body):
    call = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(),
                                  {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(call, timeout=120))
out = []
for text in request["texts"]:
    ids = post("/tokenize", {"content": text, "add_special": request["add_special"],
                             "parse_special": request["parse_special"]})["tokens"]
    out.append([ids, post("/detokenize", {"tokens": ids})["content"]])
print("RESULT" + json.dumps(out), flush=True)
import os; os._exit(0)
"""


def tokenize(
    path: Path, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True
) -> list[tuple[list[int], str]]:
    """Ids and detokenised text of each text, from llama.cpp."""
    pytest.importorskip("xllamacpp")
    request = {"path": str(path), "texts": list(texts), "add_special": add_special, "parse_special": parse_special}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], input=json.dumps(request), capture_output=True, text=True, timeout=300
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return [(ids, text) for ids, text in json.loads(line.removeprefix("RESULT"))]
    raise AssertionError(f"llama.cpp did not answer:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")


_TYPES = {
    "str": "STRING",
    "u8": "UINT8",
    "u32": "UINT32",
    "i32": "INT32",
    "f32": "FLOAT32",
    "bool": "BOOL",
}


def write_model(path: Path, keys: Mapping[str, Value], *, rows: int) -> Path:
    """A one-layer random Llama of ``rows`` vocabulary rows with the given tokenizer keys.

    The file is written by the ``gguf`` package, so that neither our writer nor our types vouch for themselves.
    """
    import gguf
    import numpy as np

    types = {ours: getattr(gguf.GGUFValueType, name) for ours, name in _TYPES.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in keys.items():
        if value.type.startswith("arr:"):
            writer.add_key_value(
                key, list(value.value), gguf.GGUFValueType.ARRAY, types[value.type.removeprefix("arr:")]
            )
        else:
            writer.add_key_value(key, value.value, types[value.type])
    rng = np.random.default_rng(0)
    names = {name: (32, 32) for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    for name, shape in names.items():
        writer.add_tensor(f"blk.0.{name}.weight", rng.normal(0, 0.2, shape).astype(np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.add_tensor("token_embd.weight", rng.normal(0, 0.2, (rows, 32)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(keys: Mapping[str, Value]) -> dict[str, object]:
    """The same keys as a reader gives them: without types."""
    return {key: value.value for key, value in keys.items()}
