"""Made-up results of every kind: as large as the largest model, as hostile as a file can be."""

from __future__ import annotations

import math
import random
from typing import Any

HOSTILE = "<script>alert(1)</script>\"'&\u202e\x00$x_1$ https://evil.example/?a=b \ud800 日本語 🙂"
COLUMNS = ["norm1", "att.W_query", "att.W_key", "att.W_value", "att.out_proj", "norm2", "ff.fc1", "ff.fc2", "ff.fc3"]


class Made:
    """A result whose two sides are given."""

    def __init__(self, value: dict[str, Any], detail: dict[str, Any]) -> None:
        self._value, self._detail = value, detail

    def as_json(self) -> dict[str, Any]:
        return self._value

    def detail(self) -> dict[str, Any]:
        return self._detail


def comparison(
    *, layers: int = 30, positions: int = 128, broken_from: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """What ``detail()`` of a verification holds; tensors of one layer onwards are wrong where asked."""
    r = random.Random(seed)
    bad = broken_from is not None
    scale = 1.0 if bad else 1e-9
    a = [r.gauss(0, 4) for _ in range(2000)]
    tensors = [
        {
            "name": f"trf_blocks.{layer}.{column}.weight",
            "row": f"layer {layer}",
            "column": column,
            "relation": "different" if (wrong := bad and layer >= broken_from and "W_" in column) else "turned",
            "error": r.uniform(0.9, 1.4) if wrong else 0.0,
            "cosine": r.uniform(-0.1, 0.2) if wrong else 1.0,
            "max_abs": r.uniform(0.5, 2) if wrong else 0.0,
            "changed": 0.98 if wrong else 0.0,
        }
        for layer in range(layers)
        for column in COLUMNS
    ]
    tensors.append(
        {
            "name": "out_head.weight",
            "row": "top",
            "column": "out_head",
            "relation": "only_a",
            "error": None,
            "cosine": None,
        }
    )
    return {
        "sides": {
            "a": {"path": "model/original", "layout": "hf", "family": "llama", "dtypes": {"BF16": 290}},
            "b": {"path": "model/copy.gguf", "layout": "gguf", "family": "llama", "dtypes": {"F32": 61, "BF16": 229}},
        },
        "positions": {
            "kl": [0.0, *(scale * 0.02 * abs(r.gauss(1, 0.5)) * math.log(2 + i) for i in range(1, positions))],
            "control_kl": [0.0, *(abs(r.gauss(2, 1)) for _ in range(1, positions))],
            "nmse": [0.0, *(scale * abs(r.gauss(0.4, 0.2)) for _ in range(1, positions))],
            "control_nmse": [0.0, *(abs(r.gauss(0.5, 0.2)) for _ in range(1, positions))],
            "noise_nmse": [1e-10 * abs(r.gauss(1, 0.2)) for _ in range(positions)],
            "tolerance": 4e-10,
            "tokens": [r.choice(["the", " ship", "日本", " of", HOSTILE]) for _ in range(positions)],
        },
        "logits": {
            "a": a,
            "b": [x + scale * r.gauss(0, 2) for x in a],
            "control": [0.3 * x + r.gauss(0, 3) for x in a],
        },
        "layers": [
            {
                "name": name,
                "error": 0.0 if i == 0 else scale * (1e-10 if bad and i <= broken_from else 1) * 1e-1 * i,
                "noise": 1e-11 * (i + 1),
                "control": None if i == 0 else 0.05 * i,
            }
            for i, name in enumerate(["embed", *(f"layer {i}" for i in range(layers)), "logits"])
        ],
        "departs": {"step": f"layer {broken_from}", "words": "Its Q and K differ."} if bad else None,
        "tensors": tensors,
    }


def verify_result(verdict: str = "pass", **options: Any) -> Made:
    bad = verdict == "fail"
    detail = comparison(broken_from=3 if bad else None, **options)
    value = {
        "schema": "convert.verify/1",
        "verdict": verdict,
        "device": "cpu",
        "max_abs": 11.3 if bad else 2.1e-5,
        "nmse": 0.41 if bad else 3.2e-12,
        "kl_max": 9.7 if bad else 4e-11,
        "kl_mean": 2.8 if bad else 3e-12,
        "top1": 0.22 if bad else 1.0,
        "first_diff_position": 1 if bad else None,
        "control": {
            "name": "rotary order flipped",
            "max_abs": 14.2,
            "nmse": 0.52,
            "kl_max": 11.0,
            "kl_mean": 2.9,
            "top1": 0.19,
            "seen": verdict != "weak",
            "first_diff_position": 1,
        },
        "tolerance": 4e-10,
        "noise": 1e-10,
        "dtype": "float32",
        "n_tokens": 128,
        "message": "A and B are different models: their logits differ by NMSE 4.1e-01 (at most 4.0e-10 would be "
        "rounding), from position 1 on; they agree on 22% of the next tokens."
        if bad
        else "A and B are the same model: their logits differ by NMSE 3.2e-12, within 4.0e-10; a copy with the rotary "
        "order flipped differs by 5.2e-01.",
        "hints": ["Position 0 is equal and later ones differ: a rotary fault.", f"Different values: {HOSTILE}."]
        if bad
        else [],
    }
    return Made(value, detail)


FAULTS = [
    ("qk-permuted", "rows of Q and K put back into half order", 2.90, "unpermute-qk"),
    ("qk-permuted-inverse", "rows of Q and K permuted once more", 8.9, "permute-qk"),
    ("k-permuted", "rows of K alone put back", 8.7, "unpermute-k"),
    ("gate-up-swapped", "gate and up exchanged", 14.6, "swap-gate-up"),
    ("norms-swapped", "the two norms of a block exchanged", 10.8, "swap-norms"),
    ("norm-offset", "norm weights off by one", 11.9, "norm-offset"),
    ("head-tied", "the head replaced by the embedding", 12.4, None),
    ("transposed", "square projections transposed", 13.3, "transpose"),
    ("embedding-scale", "embedding divided by √D", 9.6, "unscale-embedding"),
]
ROTARY = [
    ("theta", f"RoPE theta {t}", loss) for t, loss in (("1e4", 4.07), ("5e4", 2.922), ("2e5", 2.924), ("5e5", 2.99))
]


def diagnose_result(verdict: str = "broken", *, against: bool = True, layers: int = 30) -> Made:
    own = 2.904 if verdict == "good" else 5.31
    broken = verdict == "broken"
    causes = [
        {
            "fault": "qk-permuted",
            "words": "The rows of Q and K are in interleaved order, the layout says half.",
            "confidence": 0.99,
            "evidence": ["undoing it lowers the loss from 5.31 to 2.90", "rows of a pair: 0.48 interleaved, 1.26 half"],
            "loss": 2.9,
            "fix": "convert repair 'my model' OUT --fix unpermute-qk",
        }
    ]
    hypotheses = [
        {
            "name": name,
            "words": words,
            "loss": loss,
            "low": loss - 0.1,
            "high": loss + 0.1,
            "gain": own - loss,
            "gain_low": own - loss - 0.06,
            "gain_high": own - loss + 0.06,
            "tokens": 280,
            "baseline": own,
            "fix": fix,
            "explains": broken and name == "qk-permuted",
        }
        for name, words, loss, fix in FAULTS
    ]
    hypotheses += [
        {
            "name": n,
            "words": w,
            "loss": x,
            "low": x - 0.04,
            "high": x + 0.04,
            "tokens": 3000,
            "baseline": own,
            "fix": None,
        }
        for n, w, x in ROTARY
    ]
    hypotheses.append(
        {"name": "scaling", "words": "RoPE scaling dropped", "loss": None, "skipped": "there is none", "tokens": 3000}
    )
    detail: dict[str, Any] = {
        "baseline": {"loss": own, "low": own - 0.12, "high": own + 0.12, "tokens": 280},
        "hypotheses": hypotheses,
        "margin": 0.05,
        "control": {"name": "rows of Q and K flipped", "loss": 5.4, "tokens": 280},
        "probe": [
            {"row": f"layer {i}", "half": 1.25 + 0.05 * math.sin(i), "interleaved": 0.48 + 0.06 * math.cos(i)}
            for i in range(layers)
        ],
        "sides": comparison()["sides"],
    }
    if against:
        detail["against"] = comparison(layers=layers, broken_from=0)
    value = {
        "schema": "convert.diagnose/1",
        "verdict": verdict,
        "message": "The rows of Q and K are in interleaved order." if broken else "",
        "causes": causes if broken else [],
        "probe": {
            "order": "interleaved",
            "expected": "half",
            "agrees": False,
            "confidence": 0.998,
            "odd": {"q": "interleaved", "k": "interleaved"},
            "bytes": 1000,
            "sampled": False,
            **{
                name: {
                    "order": "interleaved",
                    "confidence": 0.999,
                    "h": 0.26,
                    "i": 0.1,
                    "r": 0.208,
                    "heads": 90,
                    "fits": {},
                }
                for name in ("q", "k", "both")
            },
        },
        "findings": [
            {"kind": "zeros", "message": f"{HOSTILE} holds nothing but zeros.", "tensor": HOSTILE, "hint": None}
        ],
        "hypotheses": [],
        "tensors": [],
    }
    return Made(value, detail)


def diff_result(verdict: str = "different", **options: Any) -> Made:
    whole = comparison(broken_from=5 if verdict == "different" else None, **options)
    value = {
        "schema": "convert.diff/1",
        "verdict": verdict,
        "message": "100 tensors differ." if verdict == "different" else "All tensors hold equal values.",
        "counts": {"equal": 200, "turned": 60, "different": 100 if verdict == "different" else 0},
        "missing": [f"model.layers.{i}.self_attn.q_proj.bias" for i in range(12)],
        "extra": [HOSTILE],
        "shapes": [{"name": "model.embed_tokens.weight", "a": [49152, 576], "b": [49216, 576]}],
        "dtypes": [{"name": HOSTILE, "a": "BF16", "b": "F32"}],
        "config": [{"key": "rope_theta", "a": 1e5, "b": 1e4}],
        "tokenizer": [{"key": "eos_token_id", "a": 2, "b": None}],
    }
    return Made(
        value, {"sides": whole["sides"], "tensors": whole["tensors"], "control": {"name": "Q unpermuted", "error": 1.3}}
    )
