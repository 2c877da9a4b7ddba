"""Tiny models of families that mix sliding and full layers, made by transformers and filled so that faults show."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert.checkpoint import open_checkpoint
from convert.plan import Request, make_plan
from convert.reference.layers import KVCache
from convert.reference.loading import load_reference
from convert.run import run

Tensors = dict[str, torch.Tensor]
#: Three sliding layers, one full, and one more: mixed, and longer than one period.
KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
#: Tokens of a test prompt; the window of the models here is 24.
LENGTH = 160


@dataclass(frozen=True)
class Tiny:
    """A model that transformers made and saved.

    Attributes:
        path: The folder.
        model: The module, in float32.
        state: Its parameters by Hugging Face's names; the head also where it is tied.
    """

    path: Path
    model: Any
    state: Tensors

    @property
    def logits(self) -> torch.Tensor:
        """transformers' logits of :func:`prompt`."""
        with torch.no_grad():
            return self.model(prompt(self.model.config.vocab_size)).logits


def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Norms uniform in 0.5–1.5, everything else of std 0.2."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = "norm" in name and parameter.ndim == 1
            values = rng.uniform(0.5, 1.5, parameter.shape) if plain else rng.normal(0.0, 0.2, parameter.shape)
            parameter.copy_(torch.from_numpy(np.asarray(values, np.float32)))


def tiny(path: Path, model: Any, *, seed: int = 0) -> Tiny:
    """Fill a transformers model and save it."""
    fill(model, seed)
    model.eval()
    model.save_pretrained(path)
    return Tiny(path, model, {k: v.detach().clone() for k, v in model.state_dict().items()})


def prompt(vocab: int, count: int = LENGTH, *, seed: int = 1) -> torch.Tensor:
    """Fixed random token ids, ``[1, count]``."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, vocab, (1, count)))


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference."""
    return float((a.double() - b.double()).abs().max())


def reference(path: Path) -> Any:
    """The reference model of a checkpoint."""
    with open_checkpoint(path) as opened:
        return load_reference(opened)


def run_reference(path: Path, vocab: int) -> torch.Tensor:
    """Its logits of :func:`prompt`."""
    with torch.no_grad():
        return reference(path)(prompt(vocab))


def with_and_without_cache(path: Path, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's logits in one pass, and of 100 tokens and then one at a time."""
    ids, model = prompt(vocab), reference(path)
    with torch.no_grad():
        cache = KVCache(model.n_layers)
        parts = [model(ids[:, :100], cache), *(model(ids[:, i : i + 1], cache) for i in range(100, LENGTH))]
        return model(ids), torch.cat(parts, 1)


def converted(source: Path, folder: Path, layout: str, table: Any = None, **options: Any) -> Path:
    """A conversion, also with a table that is wrong on purpose; GGUF in float32."""
    out = folder / ("out.gguf" if layout == "gguf" else f"out_{layout}")
    with open_checkpoint(source) as opened:
        request = Request(layout, tokenizer=False, **options)
        request.gguf.type = "f32"
        run(make_plan(opened, request, table=table), out)
    return out


#: After how many tokens llama.cpp is asked.
PLACES = (1, 7, 40, 128, LENGTH)


def llama_cpp(path: Path, vocab: int) -> torch.Tensor:
    """Log-probabilities of real llama.cpp at :data:`PLACES`."""
    from convert.engines.llama_cpp import logprobs

    row = prompt(vocab)[0].tolist()
    return torch.from_numpy(logprobs(path, [row[:n] for n in PLACES], threads=1))


def at_places(logits: torch.Tensor) -> torch.Tensor:
    """The same of logits ``[1, T, V]``."""
    return logits[0].double().log_softmax(-1)[[n - 1 for n in PLACES]]


TEXT = (Path(__file__).parents[1] / "data" / "multilingual.txt").read_text(encoding="utf-8")


def give_tokenizer(folder: Path, patterns: tuple[str, ...], *, nfc: bool = False) -> None:
    """A byte-level BPE of 600 tokens, really trained, that cuts texts by ``patterns``."""
    tokenizers = pytest.importorskip("tokenizers")
    from tests.tokenizer.trained import BEGIN, END, byte_level

    steps = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    tokenizer = byte_level(TEXT, split=False, steps=steps)
    if nfc:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.save(str(folder / "tokenizer.json"))
    # With the generic class: transformers 5 has one for Cohere that puts rules of its own in place of the file's.
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": BEGIN}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def token_ids(folder: Path) -> list[list[int]]:
    """What transformers makes of texts with a folder's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [*TEXT.splitlines(), "1234567 x 12x"]
    return [tokenizer.encode(line, add_special_tokens=False) for line in lines]
