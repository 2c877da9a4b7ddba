"""What the tests of both Gemmas share: the key sets of running code, and the small configs of the golden files.

``python -m tests.families.gemma`` rewrites the golden files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from convert import config as configs
from convert.table import load_table
from tests.families import golden

_GELU = torch.nn.functional.gelu


def keys(family: str) -> dict[str, Any]:
    """Configs with the true keys and shapes that go with them, by ``layout/case``."""
    file = Path(__file__).parents[1] / "data" / f"{family}_keys.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def small(family: str) -> dict[str, Any]:
    """The hub config of the first case."""
    name, case = next(iter(keys(family).items()))
    return configs.to_hub(load_table(family), name.split("/")[0], case["config"])


def gelu_table(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """GELU as llama.cpp's CPU code looks it up: from a float16 and as a float16, beyond ±10 as its limits."""
    rounded = _GELU(x.half().float(), approximate=approximate).half().float()
    return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, rounded))


if __name__ == "__main__":
    for family in ("gemma3", "gemma4"):
        golden.write(family, small(family))
