"""The pickle reader against Python's pickler, and against pickles made to hurt."""

from __future__ import annotations

import collections
import os
import pickle
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from convert.errors import FormatError
from convert.formats import pickles
from convert.formats.placeholders import Placeholder


def load(data: bytes) -> pickles.Unpickled:
    return pickles.load(data, tensor=lambda *numbers: numbers, file="test.pth")


class Evil:
    """Its pickle asks for a shell command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    @classmethod
    def doubled(cls, x: int) -> Point:
        return cls(2 * x)


class Box(dict):  # type: ignore[type-arg]
    pass


PLAIN: list[Any] = [
    None,
    True,
    False,
    0,
    255,
    256,
    65535,
    65536,
    -1,
    -(2**31),
    2**31,
    2**100,
    -(2**100),
    1.5,
    float("inf"),
    "",
    "Straße 日本語 🦙",
    "x" * 1000,
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    (1, 2, 3, 4),
    [],
    [1, [2, [3]]],
    {},
    {"a": 1, 2: "b", 3.5: None, None: 1},
    {"n": {"m": [1, (2, {"k": "v"})]}},
    collections.OrderedDict(b=1, a=2),
    list(range(3000)),
    {str(i): i for i in range(3000)},
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_equals_what_was_pickled(protocol: int) -> None:
    shared = ["same"]
    tree = {"all": PLAIN, "one": shared, "two": shared}
    found = load(pickle.dumps(tree, protocol))
    assert found.root == tree
    assert found.root["one"] is found.root["two"]
    assert found.placeholders == {}
    assert load(pickle.dumps({"all": PLAIN[:-1]}, protocol)).root != tree  # control


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_sets_bytes_and_cycles(protocol: int) -> None:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    found = load(
        pickle.dumps({"s": {1}, "f": frozenset({2}), "c": cycle, "d": collections.defaultdict(int, a=1)}, protocol)
    )
    assert found.root["s"] == [1]
    assert found.root["f"] == [2]
    assert found.root["c"][1] is found.root["c"]
    assert found.root["d"] == {"a": 1}
    if protocol >= 3:
        assert load(pickle.dumps(b"\0\xff", protocol)).root == b"\0\xff"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_objects_become_listed_placeholders(protocol: int) -> None:
    box = Box(a=1)
    tree = {
        "ns": SimpleNamespace(a=1),
        "p": Point(7),
        "box": box,
        "np": np.float32(2.5),
        "fn": Point.doubled,
        "cls": Point,
    }
    found = load(pickle.dumps(tree, protocol))
    for key in ("ns", "p", "np", "fn", "cls", "box"):
        assert isinstance(found.root[key], Placeholder), key
    assert found.root["p"].fields == {"x": 7}
    assert found.root["ns"].fields == {"a": 1}
    assert found.root["box"].items == {"a": 1}
    assert not found.root["cls"].called
    assert any(name.endswith("Point") for name in found.placeholders)
    assert any("numpy" in name for name in found.placeholders)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_executed(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "touched"
    data = pickle.dumps({"a": 1, "evil": Evil(target)}, protocol)
    with pytest.raises(FormatError, match=r"asks for \w+\.system \(starts programs\)"):
        load(data)
    assert not target.exists()
    pickle.loads(data)  # control: Python's own reader does touch it
    assert target.exists()


def test_nothing_is_imported() -> None:
    module = "antigravity_like_module_that_is_never_there"
    assert load(f"c{module}\nboom\n(S'x'\ntR.".encode()).placeholders == {f"{module}.boom": 1}
    with pytest.raises(FormatError, match=r"asks for this\.s"):
        load(b"cthis\ns\n.")
    assert "this" not in sys.modules


def test_every_way_to_call_is_inert() -> None:
    for data in (
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"(cos\nsystem\nS'true'\no.",
        b"cos\nsystem\n(S'true'\nt\x81.",
        b"cos\nsystem\n(S'true'\nt}\x92.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93(\x8c\x04truet\x81}b.",
        b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR(S'true'\ntR.",
    ):
        with pytest.raises(FormatError, match=r"asks for os\.system") as caught:
            load(data)
        assert len(caught.value.problems) == 1
        tame = data.replace(b"system", b"System").replace(b"os\n", b"so\n").replace(b"\x02os", b"\x02so")
        root = load(tame).root
        assert isinstance(root, Placeholder), data
        assert root.called


def test_cut_anywhere_is_one_error() -> None:
    data = pickle.dumps({"all": PLAIN[:-2], "o": SimpleNamespace(a=1)}, 2)
    for cut in range(0, len(data) - 1, max(1, len(data) // 150)):
        with pytest.raises(FormatError) as caught:
            load(data[:cut])
        assert len(caught.value.problems) == 1
        assert "test.pth" in str(caught.value)


def test_random_damage_never_gets_past_format_errors() -> None:
    rng = random.Random(3)
    base = pickle.dumps({"all": PLAIN[:-2], "o": SimpleNamespace(a=1), "n": np.float64(1)}, 4)
    refused = 0
    for _ in range(400):
        data = bytearray(base)
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            load(bytes(data))
        except FormatError:
            refused += 1
    for _ in range(2000):
        try:
            load(rng.randbytes(rng.randrange(1, 60)) + b".")
        except FormatError:
            refused += 1
    assert refused > 1000


HOSTILE = {
    "long text": lambda: b"X" + struct.pack("<I", 0xFFFFFFF0) + b"abc.",
    "long text 8": lambda: b"\x8d" + struct.pack("<Q", 1 << 62) + b"abc.",
    "long bytes": lambda: b"\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
    "bytearray": lambda: b"\x96" + struct.pack("<Q", 1 << 40) + b"abc.",
    "negative long": lambda: b"\x8b" + struct.pack("<i", -5) + b"abc.",
    "frame": lambda: b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b".",
    "memo": lambda: b"Nr" + struct.pack("<I", 0xFFFFFFFF) + b".",
    "memo text": lambda: b"Np99999999999\n.",
    "protocol": lambda: b"\x80\xff.",
    "extension": lambda: b"\x82\x01.",
    "buffer": lambda: b"\x97.",
    "persid": lambda: b"Pabc\n.",
    "digits": lambda: b"I" + b"9" * 5_000_000 + b"\n.",
    "too many sets": lambda: b"\x8f" * 5_000_000 + b".",
    "too many marks": lambda: b"(" * 5_000_000 + b".",
    "nested lists": lambda: b"]" * 2_000_000 + b"a" * 1_999_999 + b".",
    "nested tuples": lambda: b")" + b"\x85" * 4_000_000 + b".",
    "key of doubled tuples": lambda: b"}N" + b"2\x86" * 64 + b"Ns]s.",
    "calls": lambda: b"cos\nsystem\nq\0)q\1" + b"h\0h\1R0" * 1_000_000 + b".",
    "names": lambda: b"".join(b"c%d\nx\n0" % i for i in range(100_000)) + b".",
    "copies of a huge tuple": lambda: (
        b"(" + b"N" * 200_000 + b"tq\0ctorch._utils\n_rebuild_tensor_v3\nq\1" + b"h\1h\0R0" * 500_000 + b"."
    ),
    "short texts": lambda: b"".join(b"X\7\0\0\0" + f"{i:03d}\U0001f999".encode() for i in range(1000)) * 1400 + b".",
    "one long text": lambda: b"X" + struct.pack("<I", 31_000_000) + b"a" * 30_999_996 + "\U0001f999".encode() + b".",
    "bad persistent id": lambda: b"(NNNNNtQ.",
    "memo entries": lambda: b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(1_500_000)) + b".",
    "too large": lambda: b"N" * (pickles.MAX_BYTES + 1),
    "colliding keys": lambda: (
        b"}("
        + b"".join(
            b"\x8a\x14" + (i * ((1 << 61) - 1)).to_bytes(20, "little", signed=True) + b"N" for i in range(100_000)
        )
        + b"u)s."
    ),
    "tensors": lambda: (
        b"ctorch._utils\n_rebuild_tensor_v2\nq\0("
        + b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0aX\3\0\0\0cpuK\1tQK\0))\x89Ntq\1"
        + b"h\0h\1R0" * 500_000
        + b"."
    ),
    "no stack": lambda: b"R.",
    "empty": lambda: b"",
    "stop": lambda: b".",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_one_error_in_two_seconds(name: str) -> None:
    data = HOSTILE[name]()
    start = time.process_time()
    with pytest.raises(FormatError) as caught:
        load(data)
    assert time.process_time() - start < 20  # at most 1.5 s on a quiet machine, some of it pytest's
    assert len(caught.value.problems) == 1
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["too many sets", "memo entries", "short texts", "one long text"])
def test_hostile_pickles_in_300_mb(name: str) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from tests.fixtures.peak import peak\n"
        "from tests.formats.test_pickles import HOSTILE, load\n"
        "data = HOSTILE[sys.argv[1]]()\n"
        "before = peak()\n"
        "try: load(data)\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print(peak() - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, name, *sys.path], capture_output=True, text=True, check=True)
    kind, grown = run.stdout.split()
    assert kind == "FormatError"
    assert int(grown) < 300e6


def test_a_hostile_name_cannot_reach_the_terminal() -> None:
    with pytest.raises(FormatError, match="asks for ") as caught:
        load(b"c\x1b[2Jos\nsystem\n.")
    assert "\x1b" not in str(caught.value)
    assert "\x1b" not in str(caught.value.problems[0].as_json())
