"""Our way to a filled model: no random initialisation, then straight from the file. Argument: the HF folder."""

import json
import sys
from pathlib import Path

from llms_from_scratch.llama3 import LLAMA32_CONFIG_1B, Llama3Model

import convert

SRC = Path(sys.argv[1])
config = LLAMA32_CONFIG_1B | {"n_layers": json.loads((SRC / "config.json").read_text())["num_hidden_layers"]}
with convert.no_init():
    model = Llama3Model(config)
convert.load_into(model, SRC)
print(sum(p.numel() for p in model.parameters()))
