"""A long, coverage-guided run over the readers: ``python -m tests.trust.fuzz safetensors --runs 300000``.

`atheris` (libFuzzer for Python: ``pip install atheris``) keeps the inputs that reach new branches of ``convert`` and
mutates them further, with our own mutators that know the formats. Every input is judged as
:mod:`tests.trust.fuzzing.targets` says; what goes wrong is written down with its input and the run goes on. Figures go
to ``fuzz-READER.json`` in the folder given by ``--out``; the figures of record are in ``tests/TRUST.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from random import Random


def main() -> None:
    """Run one reader."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reader")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=int, default=0, help="stop after this long (0: after --runs)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("fuzz-out"))
    args = parser.parse_args()

    import atheris

    with atheris.instrument_imports(include=["convert"]):
        import convert.checkpoint
        import convert.config
        import convert.formats.gguf
        import convert.formats.pickles
        import convert.formats.safetensors
        import convert.formats.tf_checkpoint
        import convert.formats.torch_zip
        import convert.layered_rope
        import convert.locate
        import convert.opening
        import convert.rope
        import convert.tokenizer.sentencepiece_model  # noqa: F401
    from tests.trust.fuzzing.targets import EQUAL, REFUSED, TARGETS, UNREFERENCED

    target = TARGETS[args.reader]
    out = args.out / args.reader
    corpus = out / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    valid = target.seeds()
    survivors = list(valid)
    for i, data in enumerate(valid):
        (corpus / f"seed-{i}").write_bytes(data)
    counts = {"executions": 0, REFUSED: 0, EQUAL: 0, UNREFERENCED: 0, "findings": 0}
    slowest = 0.0
    seen: set[str] = set()
    began = time.time()

    def figures() -> None:
        rss = next(
            int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")
        )
        spent = time.process_time()
        said = {"reader": args.reader, **counts, "kinds of finding": len(seen), "cpu seconds": round(spent, 1)}
        said |= {"per cpu second": round(counts["executions"] / spent), "wall seconds": round(time.time() - began)}
        said |= {"slowest (s)": round(slowest, 3), "peak MiB": rss >> 10, "corpus": len(os.listdir(corpus))}
        (args.out / f"fuzz-{args.reader}.json").write_text(json.dumps(said, indent=1))

    def one(data: bytes) -> None:
        nonlocal slowest
        counts["executions"] += 1
        start = time.process_time()
        try:
            verdict = target.judge(data)
            counts[verdict] += 1
            if verdict != REFUSED and len(data) < 16384 and counts["executions"] % 16 == 0:
                if len(survivors) < 400:
                    survivors.append(data)
                else:
                    survivors[len(valid) + counts["executions"] % (400 - len(valid))] = data
        except Exception as error:
            counts["findings"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            key = f"{type(error).__name__} {where.filename}:{where.lineno} {str(error)[:40]}"
            name = hashlib.sha1(key.encode("utf-8", "replace")).hexdigest()[:12]
            if name not in seen and len(seen) < 200:
                (out / f"finding-{name}").write_bytes(data)
                (out / f"finding-{name}.txt").write_text(traceback.format_exc(), errors="replace")
            seen.add(name)
        took = time.process_time() - start
        if took > max(0.5, slowest):
            (out / f"slow-{took:.2f}").write_bytes(data)
        slowest = max(slowest, took)
        if counts["executions"] % 2000 == 0:
            figures()
        if args.seconds and time.time() - began > args.seconds:
            figures()
            os._exit(0)

    def change(data: bytes, limit: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.randrange(2):  # else mostly what is refused already would be broken further
            return target.change(rng.choice(survivors), rng)[:limit]
        if rng.randrange(6) == 0:
            return atheris.Mutate(data, limit)
        return target.change(data, rng)[:limit]

    flags = [f"-runs={args.runs}", "-max_len=16384", "-timeout=600", "-rss_limit_mb=4000", f"-seed={args.seed}"]
    flags += [f"-artifact_prefix={out}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
