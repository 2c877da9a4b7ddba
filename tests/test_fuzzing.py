"""Mutated files through every reader: an error of ours, or what the format's own library reads.

``python -m tests.trust.fuzz`` does the same for millions of inputs, led by coverage; its figures are in
``tests/TRUST.md``.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convert.errors import FormatError
from tests.trust.fuzzing.targets import EQUAL, REFUSED, TARGETS, Mismatch, mutated

EXAMPLES = {"sentencepiece": 60, "tensorflow": 60, "torch": 150}


@pytest.fixture(scope="module")
def files():
    return {name: target.seeds() for name, target in TARGETS.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_valid_files_are_read_as_the_library_reads_them(files, name):
    for data in files[name]:
        assert TARGETS[name].judge(data) != REFUSED or name == "tensorflow"  # a partitioned variable is among them


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_files(files, name):
    """What hypothesis picks is the seed of the changes, the same ones each time; others are tried by the script."""
    seen = {REFUSED: 0}

    @settings(
        max_examples=EXAMPLES.get(name, 200), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.integers(0, 2**48))
    def run(seed: int) -> None:
        verdict = TARGETS[name].judge(mutated(TARGETS[name], files[name], Random(seed)))
        seen[verdict] = seen.get(verdict, 0) + 1

    run()
    assert seen[REFUSED] >= 5
    assert name == "tensorflow" or seen[EQUAL] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_mutated_files(files, name):
    for seed in range(20_000):
        TARGETS[name].judge(mutated(TARGETS[name], files[name], Random(seed)))


#: What the long runs found; each was another result than the library's, or an exception that nobody expected.
FOUND = {
    "-0 in a shape": ("safetensors", b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
    "a type that is a list": ("safetensors", b'{"a":{"dtype":["F32"],"shape":[0],"data_offsets":[0,0]}}'),
    "half a surrogate": ("safetensors", b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
    "a number for a file": ("index", b'{"weight_map":{"a":2147483647}}'),
    "half a surrogate for a file": ("index", b'{"weight_map":{"a":"\\ud800"}}'),
    "a number beyond floats": ("config", b'{"model_type":"llama","hidden_size":' + b"9" * 400 + b"}"),
    "a normaliser that is a number": ("sentencepiece", b"\x0a\x03\x0a\x01a\x18\x05"),
    "a piece whose text is a number": ("sentencepiece", b"\x0a\x03\x0a\x01a\x0a\x02\x08\x05"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_fuzzing_found(name):
    reader, data = FOUND[name]
    if reader == "safetensors":
        data = len(data).to_bytes(8, "little") + data
    TARGETS[reader].judge(data)


@pytest.mark.parametrize("change", ["encrypted", "gap", "name", "mark"])
def test_what_fuzzing_found_in_archives(files, change):
    """Two programs would have read two different things, or one of them nothing."""
    data = files["torch"][0]
    start, end = data.index(b"PK\1\2"), data.rindex(b"PK\5\6")
    later = data.rindex(b"PK\1\2")
    if change == "encrypted":
        data = data[: later + 8] + bytes([data[later + 8] | 1]) + data[later + 9 :]
    elif change == "gap":
        data = data[:end] + bytes(3) + data[end:]
    elif change == "name":
        at = data.index(b"archive/data.pkl", start)
        data = data[: at + 2] + b"\xc3\xbc" + data[at + 4 :]
    else:
        from tests.trust.hostile import base

        data = base.archive(b"\x80\x02}N(00u.", storages=False)
    assert TARGETS["torch"].judge(data) == REFUSED


# ---- the judge is judged -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["shape", "bytes", "type", "missing", "KeyError"])
def test_a_wrong_reader_is_seen(files, fault, monkeypatch):
    """The control: a reader that is wrong in one number fails the comparison."""
    from dataclasses import replace

    target = TARGETS["safetensors"]

    def wrong(path: Path):
        found = target.read(path)
        name = next(iter(found.tensors))
        spec = found.tensors[name]
        if fault == "KeyError":
            raise KeyError(name)
        if fault == "missing":
            del found.tensors[name]
        else:
            change = {
                "shape": {"shape": (*spec.shape, 1)},
                "bytes": {"offset": spec.offset + 1},
                "type": {"dtype": "I32"},
            }
            found.tensors[name] = replace(spec, **change[fault])
        return found

    with pytest.raises((Mismatch, KeyError)):
        replace(target, read=wrong).judge(files["safetensors"][0])


@pytest.mark.parametrize("name", ["torch", "gguf"])
def test_another_file_is_seen(files, name, tmp_path):
    """What was read from one valid file is not what the library reads from another."""
    target = TARGETS[name]
    path = tmp_path / f"x{target.suffix}"
    path.write_bytes(files[name][0])
    found = target.read(path)
    path.write_bytes(files[name][-1])
    with pytest.raises(Mismatch):
        target.compare(found, files[name][-1], path)


def test_an_error_that_cannot_be_printed_is_seen():
    from dataclasses import replace

    def bad(path: Path):
        raise FormatError("a name: \ud800")

    with pytest.raises(UnicodeEncodeError):
        replace(TARGETS["index"], read=bad).judge(b"")
