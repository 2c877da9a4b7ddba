"""Changes to valid files that keep enough of their structure to get past the first check.

Every function takes the bytes of a file (valid or changed before) and a random generator, and gives other bytes; none
of them ever fails, for what they get may be anything.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable
from random import Random

Change = Callable[[bytes, Random], bytes]

NUMBERS = [
    *(0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 63, 64, 127, 128, 255, 256, 1000, 32767, 32768, 65535, 65536, 10**6),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
]
#: What may stand where a JSON value stands.
VALUES = [
    *("0", "1", "-1", "-0", "0.0", "1.0", "1e2", "1e400", "-1e-400", "01", "+1", "0x1", "1_000", "NaN", "Infinity"),
    *(
        "-Infinity",
        "null",
        "true",
        "false",
        '""',
        '"a"',
        "[]",
        "{}",
        "[0]",
        "[[]]",
        '{"a":1}',
        '"\\ud800"',
        '"\\u0000"',
    ),
    *('"../x"', '"/etc/passwd"', '"a/b"', '"F32"', '"BF16"', '"F4"', '"F8_E8M0"', '"pt"', '"\\""', "'a'", "nul", ""),
    *("9" * 25, "9" * 400, "9" * 5000, "[" * 40, "[" * 3000, '{"a":' * 3000, '"\x01"', '"\x7f"', "\t", "/*x*/"),
    *(str(n) for n in NUMBERS),
]
_OPCODES = [op.code.encode("latin-1") for op in pickletools.opcodes]
_GLOBALS = [
    *(b"os\nsystem\n", b"builtins\neval\n", b"torch\nload\n", b"collections\nOrderedDict\n", b"torch\nFloatStorage\n"),
    *(
        b"torch._utils\n_rebuild_tensor_v2\n",
        b"torch._utils\n_rebuild_parameter\n",
        b"torch\nSize\n",
        b"torch\nbfloat16\n",
    ),
    *(b"torch._utils\n_rebuild_tensor_v3\n", b"torch._tensor\n_rebuild_from_type_v2\n", b"copyreg\n_reconstructor\n"),
    *(b"builtins\nset\n", b"_codecs\nencode\n", b"torch\ndevice\n", b"x\ny\n"),
]


def bytes_changed(data: bytes, rng: Random) -> bytes:
    """A few bytes or fields set, cut, doubled, moved."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(8)
        if kind == 0:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            width = rng.choice([1, 2, 4, 8])
            out[at : at + width] = (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 3:
            del out[at : at + rng.choice([1, 2, 4, 8, 16, 64])]
        elif kind == 4:
            piece = out[at : at + rng.choice([1, 4, 8, 16, 64])]
            where = rng.randrange(len(out) + 1)
            out[where:where] = piece
        elif kind == 5 and rng.randrange(4) == 0:
            del out[at:]
        elif kind == 6:
            out += bytes(rng.randrange(1, 33))
        else:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(out)


def json_changed(text: bytes, rng: Random) -> bytes:
    """One token of a JSON text replaced, removed, doubled, or swapped with another."""
    tokens = _tokens(text)
    if not tokens:
        return rng.choice(VALUES).encode()
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(tokens))
        kind = rng.randrange(7)
        if kind <= 2:
            tokens[at] = rng.choice(VALUES).encode()
        elif kind == 3:
            tokens[at] = tokens[rng.randrange(len(tokens))]
        elif kind == 4:
            end = at + rng.randrange(1, 16)
            tokens[at:at] = tokens[at:end]
        elif kind == 5 and len(tokens) > 1:
            del tokens[at : at + rng.randrange(1, 9)]
        else:
            other = rng.randrange(len(tokens))
            tokens[at], tokens[other] = tokens[other], tokens[at]
        if not tokens:
            break
    return b"".join(tokens)


def _tokens(text: bytes) -> list[bytes]:
    """Strings, numbers and words, and every other byte by itself."""
    out, at = [], 0
    while at < len(text):
        end = at + 1
        if text[at] == 0x22:
            while end < len(text) and text[end] != 0x22:
                end += 2 if text[end] == 0x5C else 1
            end += 1
        elif text[at : at + 1].isalnum() or text[at] in b"-+.":
            while end < len(text) and (text[end : end + 1].isalnum() or text[end] in b"-+."):
                end += 1
        out.append(text[at:end])
        at = end
    return out


def safetensors_changed(data: bytes, rng: Random) -> bytes:
    """The header's JSON changed and its length made right (mostly); or any bytes."""
    if len(data) < 8 or rng.randrange(4) == 0:
        return bytes_changed(data, rng)
    length = min(struct.unpack_from("<Q", data)[0], len(data) - 8)
    header, rest = data[8 : 8 + length], data[8 + length :]
    header = json_changed(header, rng) if rng.randrange(5) else bytes_changed(header, rng)
    stated = rng.choice(NUMBERS) if rng.randrange(40) == 0 else len(header)
    if rng.randrange(8) == 0:
        rest = rest[: rng.randrange(len(rest) + 1)] + bytes(rng.randrange(9))
    return struct.pack("<Q", stated) + header + rest


def pickle_changed(data: bytes, rng: Random) -> bytes:
    """Operations of a pickle replaced, removed, doubled or moved; their arguments too."""
    try:
        starts = [at for _, _, at in pickletools.genops(data)]
    except Exception:
        return bytes_changed(data, rng)
    ops = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(rng.randrange(1, 4)):
        if not ops:  # the operations before may have left nothing
            return data
        at = rng.randrange(len(ops))
        kind = rng.randrange(9)
        if kind == 0:
            ops[at] = rng.choice(ops)
        elif kind == 1:
            ops[at:at] = ops[at : at + rng.randrange(1, 6)]
        elif kind == 2 and len(ops) > 1:
            del ops[at : at + rng.randrange(1, 4)]
        elif kind == 3:
            ops[at] = rng.choice(_OPCODES) + ops[at][1:]
        elif kind == 4:
            ops[at:at] = [rng.choice(_OPCODES)]
        elif kind == 5:
            ops[at] = b"c" + rng.choice(_GLOBALS)
        elif kind == 6:
            value = rng.choice(NUMBERS)
            ops[at] = rng.choice(
                [
                    b"K" + bytes([value & 255]),
                    b"M" + struct.pack("<H", value & 0xFFFF),
                    b"J" + struct.pack("<I", value & 0xFFFFFFFF),
                    b"\x8a\x09" + value.to_bytes(9, "little"),
                    b"N",
                    b"\x88",
                    b"X\1\0\0\0a",
                ]
            )
        elif kind == 7:
            ops[at] = bytes_changed(ops[at], rng)
        else:
            other = rng.randrange(len(ops))
            ops[at], ops[other] = ops[other], ops[at]
    return b"".join(ops)


def torch_changed(data: bytes, rng: Random) -> bytes:
    """The object tree changed inside a sound archive, the archive's records changed, or any bytes."""
    if rng.randrange(5) == 0:
        return bytes_changed(data, rng)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:
        return bytes_changed(data, rng)
    if rng.randrange(6):
        records = [(n, pickle_changed(d, rng) if n.endswith("data.pkl") else d) for n, d in records]
    elif records:
        at = rng.randrange(len(records))
        name, content = records[at]
        kind = rng.randrange(5)
        if kind == 0:
            del records[at]
        elif kind == 1:
            records.append(records[at])
        elif kind == 2:
            records[at] = (rng.choice(["../" + name, "/" + name, name + "x", "", "a/data.pkl", "a\\b"]), content)
        elif kind == 3:
            records[at] = (name, bytes_changed(content, rng))
        else:
            records.reverse()
    return packed(records, zipfile.ZIP_DEFLATED if rng.randrange(30) == 0 else zipfile.ZIP_STORED)


def packed(records: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive."""
    import warnings

    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method) as archive:
        warnings.simplefilter("ignore")  # of names that occur twice
        for name, content in records:
            info = zipfile.ZipInfo(name or "x")
            info.compress_type = method
            archive.writestr(info, content)
    return out.getvalue()


def gguf_changed(data: bytes, rng: Random) -> bytes:
    """Counts, lengths, types and offsets set to numbers that matter; key-values doubled; or any bytes."""
    kind = rng.randrange(5)
    if kind == 0 or len(data) < 32:
        return bytes_changed(data, rng)
    out = bytearray(data)
    if kind == 1:  # one of the header's two counts a little off
        at = rng.choice([8, 16])
        value = struct.unpack_from("<Q", out, at)[0] + rng.choice([-1, 1, 2])
        struct.pack_into("<Q", out, at, value % (1 << 64))
        return bytes(out)
    for _ in range(rng.randrange(1, 4)):
        width = rng.choice([4, 4, 8])
        # Most fields begin where a small number stands: find one.
        at = rng.randrange(4, max(5, min(len(out), 2048) - width))
        for _ in range(64):
            if at + width > len(out) or not out[at + 1 : at + width].strip(b"\0"):
                break
            at += 1
        if at + width > len(out):
            continue
        old = int.from_bytes(out[at : at + width], "little")
        new = rng.choice([old + 1, old - 1, old * 2, rng.randrange(0, 42), rng.choice(NUMBERS), rng.choice(NUMBERS)])
        out[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    if kind == 4:
        out = bytearray(bytes_changed(bytes(out), rng))
    return bytes(out)


def protobuf_changed(data: bytes, rng: Random) -> bytes:
    """Tags and lengths of a protobuf message changed, or any bytes."""
    if rng.randrange(3) == 0 or not data:
        return bytes_changed(data, rng)
    out = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out))
        out[at] = rng.choice([0, 1, 7, 8, 10, 13, 18, 21, 24, 26, 34, 127, 128, 255, rng.randrange(256)])
    return bytes(out)


def table_changed(data: bytes, rng: Random) -> bytes:
    """A sorted table changed, and the checksums of its blocks made right where they can still be found."""
    from tests.trust.fuzzing.seeds import checksummed

    out = bytes_changed(data, rng) if rng.randrange(2) else protobuf_changed(data, rng)
    return checksummed(out) if rng.randrange(4) else out
