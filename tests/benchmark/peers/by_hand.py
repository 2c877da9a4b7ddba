"""Meta to Hugging Face by hand, as people write it: twelve lines, everything in memory at once. Arguments: SRC OUT."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

SRC, OUT = Path(sys.argv[1]), Path(sys.argv[2])
NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
params = json.loads((SRC / "params.json").read_text())
weights = torch.load(SRC / "consolidated.00.pth", mmap=True, weights_only=True)
top = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
new = {f"{top[k.split('.')[0]]}.weight": v for k, v in weights.items() if not k.startswith("layers.")}
for layer in range(params["n_layers"]):
    for theirs, ours in NAMES.items():
        w = weights[f"layers.{layer}.{theirs}.weight"]
        if theirs in ("attention.wq", "attention.wk"):
            heads = params["n_heads" if theirs == "attention.wq" else "n_kv_heads"]
            w = w.view(heads, -1, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
        new[f"model.layers.{layer}.{ours}.weight"] = w
OUT.mkdir(parents=True, exist_ok=True)
save_file(new, OUT / "model.safetensors", metadata={"format": "pt"})
