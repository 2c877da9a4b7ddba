"""The book's own way to a filled model: build it, load the whole file, copy each tensor. Argument: the HF folder."""

import json
import sys
from pathlib import Path

import torch
from llms_from_scratch.llama3 import LLAMA32_CONFIG_1B, Llama3Model, load_weights_into_llama
from safetensors.torch import load_file

SRC = Path(sys.argv[1])
config = LLAMA32_CONFIG_1B | {"n_layers": json.loads((SRC / "config.json").read_text())["num_hidden_layers"]}
torch.manual_seed(0)
model = Llama3Model(config)
load_weights_into_llama(model, config, load_file(SRC / "model.safetensors"))
print(sum(p.numel() for p in model.parameters()))
