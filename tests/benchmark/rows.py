"""The rows of the table: which work is measured, and what it must reach. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """One conversion, measured against ``cp`` of the larger of its source and its output.

    Attributes:
        name: What ``--only`` matches and the table shows.
        source: ``hf``, ``meta`` (made by :mod:`tests.benchmark.checkpoint`) or ``gguf`` (our own q8_0 export).
        arguments: The command line after ``convert``; ``{src}`` and ``{out}`` are filled in.
        ratio: Time allowed, as a multiple of ``cp``, on top of half a second for starting; None: not bounded by cp.
        peak: Peak memory allowed, MiB.
        out: Name of the output.
        ggml: Whether ggml may be used.
        peer: A script of :mod:`tests.benchmark.peers` that does the same from the same source.
        raw: Time allowed, as a multiple of what ``peers/raw_ggml.py`` prints; None: not bounded by it.
        runs: At most so many runs that count, for work that takes minutes.
        prepare: A command that makes ``out`` before each run and is not measured.
    """

    name: str
    source: str
    arguments: str
    ratio: float | None
    peak: float
    out: str = "out"
    ggml: bool = True
    peer: str | None = None
    raw: float | None = None
    runs: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    prepare: str | None = None


def _pair(name: str, source: str, arguments: str, fast: float, slow: float, peak: float, out: str = "out") -> list[Row]:
    """The same work with the extra ``quantize`` and without it."""
    return [
        Row(name + ", with quantize", source, arguments, fast, peak, out),
        Row(name + ", without", source, arguments, slow, peak, out, ggml=False, env={"CONVERT_NO_GGML": "1"}),
    ]


ROWS = [
    Row("hf-to-scratch", "hf", "hf-to-scratch {src} {out}", 1.3, 120),
    Row("hf-to-scratch --hash", "hf", "hf-to-scratch {src} {out} --hash", 3.0, 150),
    Row("check --source", "hf", "check {out} --source {src}", 2.0, 150, prepare="hf-to-scratch {src} {out}"),
    Row("check, with full hashes", "hf", "check {out}", 2.0, 120, prepare="hf-to-scratch {src} {out} --hash"),
    Row("meta-to-hf", "meta", "meta-to-hf {src} {out}", 1.5, 150, peer="by_hand"),
    Row("hf-to-meta --model-parallel 8", "hf", "hf-to-meta {src} {out} --model-parallel 8", 2.0, 150),
    *_pair("hf-to-scratch --dtype float16", "hf", "hf-to-scratch {src} {out} --dtype float16", 2, 4, 200),
    *_pair("hf-to-scratch --dtype float32", "hf", "hf-to-scratch {src} {out} --dtype float32", 2, 4, 200),
    Row("hf-to-gguf bf16", "hf", "hf-to-gguf {src} {out} --type bf16 --no-tokenizer", 1.3, 150, "out.gguf"),
    *_pair("hf-to-gguf f16", "hf", "hf-to-gguf {src} {out} --type f16 --no-tokenizer", 1.5, 4, 200, "out.gguf"),
    *_pair("hf-to-gguf q8_0", "hf", "hf-to-gguf {src} {out} --type q8_0 --no-tokenizer", 1.5, 4, 200, "out.gguf"),
    Row(
        "hf-to-gguf q4_k_m",
        "hf",
        "hf-to-gguf {src} {out} --type q4_k_m --no-tokenizer",
        None,
        400,
        "out.gguf",
        raw=1.2,
        runs=2,
    ),
    *_pair("gguf-to-hf q8_0 to float16", "gguf", "gguf-to-hf {src} {out} --dtype float16 --no-tokenizer", 2.5, 15, 250),
]

#: Commands that must answer at once and never import torch.
QUICK = {"--help": "--help", "inspect": "inspect {src}", "validate": "validate {src}"}
QUICK_SECONDS = 0.5

#: Looking at the numbers alone: time at most this multiple of reading the file, on top of half a second for starting,
#: and MiB. Random weights tell nothing, so the exit code is 3.
PROBE, PROBE_RATIO, PROBE_PEAK, PROBE_CODE = "diagnose {src} --probe-only", 2.0, 150, 3

#: Filling a model: peak at most this multiple of the model's bytes plus this many MiB; this much faster than the book.
LOAD_PEAK, LOAD_EXTRA, LOAD_SPEEDUP = 1.1, 600, 5.0

#: Verifying layer by layer, HF against Meta in float32 on the CPU: peak MiB; time as a multiple of the whole models'.
VERIFY_PEAK, VERIFY_RATIO = 800, 1.3
#: ``diff`` of the same model in two layouts: MiB, and times what reading both files takes, on top of half a second.
DIFF_PEAK, DIFF_RATIO = 120, 1.5
