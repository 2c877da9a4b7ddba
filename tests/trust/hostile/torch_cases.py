# ruff: noqa: E501, SIM223 (tables of inputs: one to a line)
"""Torch files: pickles that would run something, explode or never end; archives that lie."""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.trust.hostile import base
from tests.trust.hostile.harness import Case
from tests.trust.hostile.sparse import hole

#: What a pickle can ask for so that a program runs; ``{}`` is a shell command.
CALLS: dict[str, Callable[[str], bytes]] = {
    "os.system": lambda sh: b"cos\nsystem\n(" + base.text(sh) + b"tR",
    "posix.system": lambda sh: b"cposix\nsystem\n(" + base.text(sh) + b"tR",
    "nt.system": lambda sh: b"cnt\nsystem\n(" + base.text(sh) + b"tR",
    "subprocess.Popen": lambda sh: (
        b"csubprocess\nPopen\n((" + base.text("sh") + base.text("-c") + base.text(sh) + b"ltR"
    ),
    "subprocess.run by OBJ": lambda sh: (
        b"(csubprocess\nrun\n(" + base.text("sh") + base.text("-c") + base.text(sh) + b"lo"
    ),
    "os.system by INST": lambda sh: b"(" + base.text(sh) + b"ios\nsystem\n",
    "builtins.eval": lambda sh: b"cbuiltins\neval\n(" + base.text(f"__import__('os').system({sh!r})") + b"tR",
    "__builtin__.eval of Python 2": lambda sh: (
        b"c__builtin__\neval\n(" + base.text(f"__import__('os').system({sh!r})") + b"tR"
    ),
    "builtins.exec": lambda sh: b"cbuiltins\nexec\n(" + base.text(f"import os; os.system({sh!r})") + b"tR",
    "builtins.compile": lambda sh: (
        b"cbuiltins\ncompile\n(" + base.text("import os") + base.text("x") + base.text("exec") + b"tR"
    ),
    "builtins.getattr": lambda sh: b"cbuiltins\ngetattr\n(cos\n__dict__\n" + base.text("get") + b"tR",
    "builtins.__import__": lambda sh: b"cbuiltins\n__import__\n(" + base.text("antigravity") + b"tR",
    "builtins.open": lambda sh: b"cbuiltins\nopen\n(" + base.text(sh.split()[-1].strip("'")) + base.text("w") + b"tR",
    "torch.load again": lambda sh: b"ctorch\nload\n(" + base.text("decoy.pt") + b"tR",
    "torch.hub.load": lambda sh: b"ctorch.hub\nload\n(" + base.text("a/b") + base.text("c") + b"tR",
    "torch.serialization.load": lambda sh: b"ctorch.serialization\nload\n(" + base.text("decoy.pt") + b"tR",
    "pickle.loads": lambda sh: b"c_pickle\nloads\n(" + base.text("x") + b"tR",
    "pickle.Unpickler": lambda sh: b"cpickle\nUnpickler\n(" + base.text("x") + b"tR",
    "runpy.run_path": lambda sh: b"crunpy\nrun_path\n(" + base.text("decoy.py") + b"tR",
    "importlib": lambda sh: b"cimportlib\nimport_module\n(" + base.text("this") + b"tR",
    "shutil.rmtree": lambda sh: b"cshutil\nrmtree\n(" + base.text("in") + b"tR",
    "socket.create_connection": lambda sh: b"csocket\ncreate_connection\n((" + base.text("127.0.0.1") + b"K\x09ttR",
    "ctypes.CDLL": lambda sh: b"cctypes\nCDLL\n(" + base.text("decoy.so") + b"tR",
    "code object": lambda sh: b"ctypes\nCodeType\n(K\0K\0K\0K\0K\0C\4d\0S\0N)))X\1\0\0\0xX\1\0\0\0xK\1C\0tR",
    "types.FunctionType": lambda sh: b"ctypes\nFunctionType\n(N}tR",
    "operator.attrgetter": lambda sh: b"coperator\nattrgetter\n(" + base.text("system") + b"tRcos\n__name__\n\x85R",
    "functools.partial": lambda sh: b"cfunctools\npartial\n(cos\nsystem\n" + base.text(sh) + b"tR)R",
    "a dotted name by STACK_GLOBAL": lambda sh: (
        base.text("os") + base.text("path.os.system") + b"\x93(" + base.text(sh) + b"tR"
    ),
    "NEWOBJ": lambda sh: b"csubprocess\nPopen\n(" + base.text(sh) + b"t\x81",
    "NEWOBJ_EX": lambda sh: b"csubprocess\nPopen\n(" + base.text(sh) + b"t}" + base.text("shell") + b"\x88s\x92",
    "BUILD with __setstate__": lambda sh: (
        b"ccollections\nOrderedDict\n)R}" + base.text("__setstate__") + b"cos\nsystem\nsb" + base.text(sh) + b"b"
    ),
    "copyreg extension": lambda sh: b"\x82\x01",
    "copyreg._reconstructor": lambda sh: b"ccopyreg\n_reconstructor\n(csubprocess\nPopen\ncbuiltins\nobject\nNtR",
    "torch._utils._rebuild_parameter of a call": lambda sh: (
        b"ctorch._utils\n_rebuild_parameter\n(cos\nsystem\n(" + base.text(sh) + b"tR\x89NtR"
    ),
    "_rebuild_from_type_v2": lambda sh: (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\ncbuiltins\nstr\n(" + base.text(sh) + b"t}tR"
    ),
    "torch.jit._pickle": lambda sh: b"ctorch.jit._pickle\nbuild_intlist\n(]tR",
    "a name with terminal codes": lambda sh: b"c\x1b]0;x\x07os\nsystem\n(" + base.text(sh) + b"tR",
    "operator.methodcaller": lambda sh: b"coperator\nmethodcaller\n(" + base.text("system") + base.text(sh) + b"tRcos\n__name__\n\x85R",
    "functools.reduce of getattr": lambda sh: b"cfunctools\nreduce\n(cbuiltins\ngetattr\n(cmypackage\nf\n" + base.text("__globals__") + b"ttR",
    "partial of getattr by its state": lambda sh: b"cfunctools\npartial\n(cbuiltins\nlen\ntR(cbuiltins\ngetattr\n)}NtbR",
    "getattr to __globals__": lambda sh: b"cbuiltins\ngetattr\n(cmypackage\nf\n" + base.text("__globals__") + b"tR",
    "__builtins__ of a package": lambda sh: b"cnumpy\n__builtins__\n" + base.text("eval") + b"\x86R",
    "a module in a module": lambda sh: b"ctyping\nsys\n",
    "a method of a tensor": lambda sh: b"cbuiltins\ngetattr\n(" + base.tensor("0", (40, 32)) + base.text("numpy") + b"tR)R",
    "a method of a path": lambda sh: b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\n(" + base.text("decoy") + b"tR" + base.text("unlink") + b"tR)R",
    "from_file of a storage": lambda sh: b"ctorch\nFloatStorage.from_file\n(" + base.text("canary") + b"\x88K\1tR",
    "attributes for a module": lambda sh: b"cnumpy\nprod\nN}" + base.text("a") + base.text("os") + b"s\x86b",
    "items for a module's dict": lambda sh: b"cmypackage\nREGISTRY\n" + base.text("a") + b"Ns",
    "numpy.load": lambda sh: b"cnumpy\nload\n(" + base.text("decoy.npy") + b"tR",
    "numpy.testing": lambda sh: b"cnumpy.testing._private.utils\nrunstring\n(" + base.text("import os") + b"}tR",
    "numpy.f2py": lambda sh: b"cnumpy.f2py.crackfortran\nmyeval\n(" + base.text("1") + b"tR",
    "a ufunc by name": lambda sh: b"cnumpy.core\n_ufunc_reconstruct\n(" + base.text("antigravity") + base.text("x") + b"tR",
    "torch.utils": lambda sh: b"ctorch.utils.collect_env\nrun\n(" + base.text(sh) + b"tR",
    "torch._utils import": lambda sh: b"ctorch._utils\n_import_dotted_name\n(" + base.text("os.system") + b"tR",
    "torch.storage nested": lambda sh: b"ctorch.storage\n_load_from_bytes\n(" + base.text("x") + b"tR",
    "torch.fx": lambda sh: b"ctorch.fx.graph_module\nreduce_graph_module\n(}" + base.text("import os") + b"tR",
    "dill": lambda sh: b"cdill._dill\n_create_function\n)R",
    "cloudpickle, carried": lambda sh: b"cray.cloudpickle.cloudpickle\n_make_function\n)R",
    "joblib": lambda sh: b"cjoblib\nload\n(" + base.text("decoy.pkl") + b"tR",
    "pip": lambda sh: b"cpip._internal.cli.main\nmain\n(" + base.text("install") + b"tR",
    "sympy": lambda sh: b"csympy\nsympify\n(" + base.text("1") + b"tR",
    "pandas.read_pickle": lambda sh: b"cpandas\nread_pickle\n(" + base.text("decoy.pkl") + b"tR",
    "a module through another": lambda sh: b"ctransformers.utils\nimport_utils.importlib.import_module\n(" + base.text("os") + b"tR",
    "a module under another name": lambda sh: b"csix.moves.builtins\neval\n(" + base.text("1") + b"tR",
    "Python 2's commands": lambda sh: b"ccommands\ngetoutput\n(" + base.text(sh) + b"tR",
    "a class out of nothing": lambda sh: b"cbuiltins\ntype\n(" + base.text("X") + b")}tR",
    "logging's files": lambda sh: b"clogging\nFileHandler\n(" + base.text("canary") + b"tR",
    "argparse's files": lambda sh: b"cargparse\nFileType\n(" + base.text("w") + b"tR(" + base.text("canary") + b"tR",
    "hidden in a popped value": lambda sh: b"cos\nsystem\n(" + base.text(sh) + b"tR0N",
    "texts evaluated as type hints": lambda sh: b"ctorch.nested._internal.nested_int\nget_type_hints\n(cmypackage\nX\n)\x81tR",
    "yaml's unsafe loader": lambda sh: b"cyaml\nUnsafeLoader\n(" + base.text("!!python/name:os.system") + b"tR",
    "a command of a library": lambda sh: b"caccelerate\nnotebook_launcher\n(cbuiltins\nlen\ntR",
    "a server in torch": lambda sh: b"ctorch.distributed.debug._frontend\nThreadingHTTPServer\n)R",
    "an evaluated plot": lambda sh: b"cmatplotlib.cbook\nget_sample_data\n(" + base.text("x") + b"tR",
    "attrs' compiler": lambda sh: b"cattr._make\n_compile_and_eval\n(" + base.text("import os") + b"}tR",
    "PIL's ghostscript": lambda sh: b"cPIL.EpsImagePlugin\nGhostscript\n)R",
    "Popen of another module": lambda sh: b"cmypackage.tools\nPopen\n(" + base.text(sh) + b"tR",
    "a partial that is called": lambda sh: b"cfunctools\npartial\n(cmypackage.tools\nrun_command\n" + base.text(sh) + b"tR)R",
    "reduce of a loader": lambda sh: b"cfunctools\nreduce\n(cmypackage.tools\nload\n(" + base.text("a") + base.text("b") + b"ttR",
    "a module's own main": lambda sh: b"cmypackage.__main__\nX\n",
    "a storage's method": lambda sh: b"cbuiltins\ngetattr\n((" + base.text("storage") + b"ctorch\nFloatStorage\n" + base.text("0") + base.text("cpu") + b"M\0\5tQ" + base.text("_write_file") + b"tR",
    "_rebuild_from_type": lambda sh: b"ctorch._tensor\n_rebuild_from_type\n(cmypackage\nload\ncmypackage\nX\n(" + base.text("x") + b"t}tR",
    "iter of a partial": lambda sh: b"cbuiltins\niter\n(cfunctools\npartial\n(cmypackage\nload\ntRNtR",
    "sitecustomize": lambda sh: b"csitecustomize\nx\n",
    "a metaclass": lambda sh: b"cnumbers\nABCMeta\n(" + base.text("X") + b")}tR",
    "before damage": lambda sh: b"cos\nsystem\n(" + base.text(sh) + b"tR\xff",
}  # fmt: skip

#: What a checkpoint may hold: it is left unread, which is what the note in the output says.
HARMLESS: dict[str, Callable[[str], bytes]] = {
    "numpy's unpickling": lambda sh: b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tC\1btR",
    "a class of somebody's own": lambda sh: b"cmypackage.config\nTrainConfig\n)\x81}" + base.text("command") + base.text(sh) + b"sb",
    "argparse.Namespace": lambda sh: b"cargparse\nNamespace\n)R}" + base.text("command") + base.text(sh) + b"sb",
}  # fmt: skip

#: Pickles that are no use to anybody: whole ones.
TREES: dict[str, Callable[[], bytes]] = {
    "LONG4 of 2^31": lambda: b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "LONG4 negative": lambda: b"\x80\x02\x8b\xff\xff\xff\xff.",
    "LONG1 of 255 bytes": lambda: b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
    "LONG4 of a megabyte": lambda: b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".",
    "decimal digits": lambda: b"I" + b"9" * 1_000_000 + b"\n.",
    "decimal digits, a LONG": lambda: b"L" + b"9" * 4_000_000 + b"L\n.",
    "BINBYTES8 of 2^63": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 63) + b"a.",
    "BINBYTES of 4 GB": lambda: b"\x80\x03B" + struct.pack("<I", 0xFFFFFFFF) + b"a.",
    "BINUNICODE8 of 2^64-1": lambda: b"\x80\x04\x8d" + struct.pack("<Q", (1 << 64) - 1) + b"a.",
    "BINUNICODE of 4 GB": lambda: b"\x80\x02X" + struct.pack("<I", 0xFFFFFFFF) + b"a.",
    "BINSTRING negative": lambda: b"\x80\x02T" + struct.pack("<i", -1) + b"a.",
    "BYTEARRAY8 of 2^40": lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"a.",
    "FRAME of 2^60": lambda: b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"}.",
    "PROTO 255": lambda: b"\x80\xff}.",
    "memo number 2^32-1": lambda: b"\x80\x02}r\xff\xff\xff\xff.",
    "memo number of 30 digits": lambda: b"\x80\x02}p" + b"9" * 30 + b"\n.",
    "memo that was never put": lambda: b"\x80\x02h\5.",
    "memo bomb of doubled lists": lambda: b"\x80\x02]" + b"".join(b"q%c(h%ch%cl" % (i, i, i) for i in range(200)) + b".",
    "memo bomb of doubled tuples as a key": lambda: b"\x80\x02}N" + b"2\x86" * 100 + b"Ns.",
    "a million memo entries": lambda: b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(1_000_000)) + b".",
    "a list in itself": lambda: b"\x80\x02]q\0h\0a.",
    "a dict in itself": lambda: b"\x80\x02}q\0X\1\0\0\0ah\0s.",
    "a cycle through a state dict": lambda: b"\x80\x02}q\0(" + base.text("model") + b"h\0" + base.text("w") + base.tensor("0", (40, 32)) + b"u.",
    "2,000,000 nested lists": lambda: b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "1,000,000 nested tuples": lambda: b")" + b"\x85" * 1_000_000 + b".",
    "100,000 nested dicts": lambda: b"}X\1\0\0\0a" * 100_000 + b"}" + b"s" * 100_000 + b".",
    "100,000 nested dicts above tensors": lambda: b"}X\1\0\0\0a" * 100_000 + base.state()[2:-1] + b"s" * 100_000 + b".",
    "nested marks": lambda: b"(" * 2_000_000 + b".",
    "nested calls": lambda: b"cos\nsystem\n" * 1000 + b")R" + b"\x85R" * 999 + b".",
    "nested types of tensors": lambda: b"ctorch._tensor\n_rebuild_from_type_v2\nq\0" + b"(h\0ctorch\nTensor\n" * 3000 + b")" + b"}tR" * 3000 + b".",
    "colliding keys": lambda: b"}(" + b"".join(base.whole(i * ((1 << 61) - 1)) + b"N" for i in range(60_000)) + b"u.",
    "colliding floats": lambda: b"}(" + b"".join(b"G" + struct.pack(">d", float(2**61 - 1) * 2.0**i) + b"N" for i in range(900)) + b"u.",
    "a text of rare letters": lambda: b"X" + struct.pack("<I", 30_000_000) + b"a" * 29_999_996 + "\U0001f999".encode() + b".",
    "a text that is no UTF-8": lambda: b"X\4\0\0\0\xff\xfe\xff\xfe.",
    "a text of half surrogates": lambda: b"}X\3\0\0\0\xed\xa0\x80Ns.",
    "raw unicode of half surrogates": lambda: b"}V\\ud800\nNs.",
    "more than 32 MB": lambda: b"N" * ((32 << 20) + 1),
    "nothing": lambda: b"",
    "only STOP": lambda: b".",
    "no STOP": lambda: b"\x80\x02}",
    "200,001 tensors": lambda: b"(" + base.tensor("0", (1,), numel=1280) + b"q\0" + base.tensor("0", (1,), numel=1280)[: -1].join([b""]) + b"l.",
    "a module instead of a state dict": lambda: b"ctorch.nn.modules.linear\nLinear\n)\x81}b.",
    "sets of sets": lambda: b"\x80\x04\x8f" + b"(\x8f" * 1000 + b"\x90" * 1000 + b".",
    "a frozenset of a dict": lambda: b"\x80\x04(}\x91.",
    "persistent id as text": lambda: b"Pabc\n.",
    "persistent id of a tuple of lists": lambda: b"(]]]]]tQ.",
    "a type that is no type": lambda: b"ctorch\nfloat16\n)R.",
    "Python's ellipsis and slices": lambda: b"cbuiltins\nEllipsis\ncbuiltins\nslice\n(K\1NNtR\x86.",
}  # fmt: skip

_T = "model.norm.weight"


def _twisted(shape: tuple[int, ...] = (32,), **more: object) -> bytes:
    """The state dict with one tensor changed."""
    index = list(base.SHAPES).index(_T)
    items = b"".join(base.text(n) + base.tensor(str(i), s) for i, (n, s) in enumerate(base.SHAPES.items()) if n != _T)
    return b"\x80\x02}(" + items + base.text(_T) + base.tensor(str(index), shape, **{"numel": 32, **more}) + b"u."  # type: ignore[arg-type]


TENSORS: dict[str, Callable[[], bytes]] = {
    "a shape of 2^62": lambda: _twisted((1 << 62,)),
    "a shape whose product overflows": lambda: _twisted((1 << 32, 1 << 32, 1 << 32)),
    "a negative shape": lambda: _twisted((-32,)),
    "an offset beyond the storage": lambda: _twisted(offset=1),
    "an offset of 2^63": lambda: _twisted(offset=1 << 63),
    "a negative offset": lambda: _twisted(offset=-4),
    "negative strides": lambda: _twisted(strides=(-1,)),
    "strides beyond the storage": lambda: _twisted(strides=(2,)),
    "strides of 2^62": lambda: _twisted(strides=(1 << 62,)),
    "strides of zero, 2^50 elements": lambda: _twisted((1 << 50,), strides=(0,)),
    "65 dimensions": lambda: _twisted((1,) * 65),
    "fewer strides than dimensions": lambda: _twisted((4, 8), strides=(1,)),
    "a storage of 2^62 elements": lambda: _twisted(numel=1 << 62),
    "a storage of another type": lambda: _twisted(kind="DoubleStorage"),
    "a storage of a type nobody knows": lambda: _twisted(kind="EvilStorage"),
    "a quantised storage": lambda: _twisted(kind="QInt8Storage"),
    "a storage with a path for a key": lambda: base.state().replace(base.text("3"), base.text("../../decoy")),
    "a storage that is absent": lambda: base.state().replace(base.text("3"), base.text("99")),
    "a storage of two sizes": lambda: base.state(base.text("x") + base.tensor("0", (3,), numel=3)),
}


def _every_opcode() -> bytes:
    """Each operation of ``pickletools`` once, with an argument of its kind."""
    samples = {"int4": 4, "uint1": 1, "uint2": 2, "uint4": 4, "uint8": 8, "float8": 8, "long4": 4, "long1": 1}
    out = b"\x80\x04}(NN"
    for op in pickletools.opcodes:
        if op.name in ("STOP", "FRAME"):
            continue
        width = samples.get(op.arg.name, 0) if op.arg is not None else 0
        line = op.arg is not None and op.arg.n == pickletools.UP_TO_NEWLINE
        out += b"((NN" + op.code.encode("latin-1") + bytes(width) + (b"1\n1\n" if line else b"")
    return out + b"."


# ---- archives ------------------------------------------------------------------------------------------------------


def _records() -> list[tuple[str, bytes]]:
    return [
        ("archive/data.pkl", base.state()),
        *((f"archive/data/{i}", d) for i, d in enumerate(base.DATA.values())),
        ("archive/version", b"3\n"),
    ]


def _changed(find: bytes, put: bytes, *, nth: int = 1) -> bytes:
    data = base.archive()
    at = -1
    for _ in range(nth):
        at = data.index(find, at + 1)
    return data[:at] + put + data[at + len(put) :]


def _listed(change: Callable[[list[int]], None], which: int = 0) -> bytes:
    """The archive with the fields of one directory record changed."""
    data = bytearray(base.archive())
    at = data.index(b"PK\1\2")
    for _ in range(which):
        at = data.index(b"PK\1\2", at + 1)
    layout = struct.Struct("<IHHHHHHIIIHHHHHII")
    fields = list(layout.unpack_from(data, at))
    change(fields)
    layout.pack_into(data, at, *fields)
    return bytes(data)


def _set(index: int, value: int) -> Callable[[list[int]], None]:
    return lambda fields: fields.__setitem__(index, value)


def _zip64(sizes: tuple[int, ...]) -> bytes:
    """An archive whose last record has its numbers in a zip64 field."""
    data = base.archive()
    start = data.index(b"PK\1\2")
    end = data.index(b"PK\5\6")
    layout = struct.Struct("<IHHHHHHIIIHHHHHII")
    fields = list(layout.unpack_from(data, start))
    name = data[start + 46 : start + 46 + fields[10]]
    rest = data[start + 46 + fields[10] : end]
    extra = struct.pack("<HH", 1, 8 * len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    fields[8] = fields[9] = 0xFFFFFFFF
    fields[11] = len(extra)
    if len(sizes) > 2:
        fields[16] = 0xFFFFFFFF
    directory = layout.pack(*fields) + name + extra + rest
    number = len(list(_finds(directory, b"PK\1\2")))
    return (
        data[:start] + directory + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, number, number, len(directory), start, 0)
    )


def _finds(data: bytes, what: bytes) -> Iterator[int]:
    at = data.find(what)
    while at >= 0:
        yield at
        at = data.find(what, at + 1)


def _huge_directory(entries: int) -> bytes:
    fixed = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0)
    head = b"PK\3\4" + bytes(22) + struct.pack("<HH", 10, 0) + b"x/data.pkl"
    body = b"".join(fixed + b"%08d" % i for i in range(entries))
    wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, entries, entries, len(body), len(head))
    wide += struct.pack("<IIQI", 0x07064B50, 0, len(head) + len(body), 1)
    return head + body + wide + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "a deflated bomb for a tree": lambda: base.packed([("archive/data.pkl", b"N" * (64 << 20))], zipfile.ZIP_DEFLATED),
    "deflated storages": lambda: base.archive(method=zipfile.ZIP_DEFLATED),
    "a tree in .. ": lambda: base.packed([("../archive/data.pkl", base.state())]),
    "records with .. and absolute names": lambda: base.packed([*_records(), ("../../escape", b"x"), ("/tmp/escape", b"x")]),
    "a root of ..": lambda: base.archive(root=".."),
    "Windows' paths": lambda: base.packed([("C:\\x\\data.pkl", base.state())]),
    "a name twice": lambda: base.packed([*_records(), ("archive/data/0", bytes(len(base.DATA["model.embed_tokens.weight"])))]),
    "two trees": lambda: base.packed([*_records(), ("other/data.pkl", base.state())]),
    "overlapping records": lambda: _listed(_set(16, 10), 2),
    "every record at one place": lambda: _listed(_set(16, 0), 3),
    "a wrong CRC of the tree": lambda: _listed(_set(7, 12345)),
    "an encrypted tree": lambda: _listed(lambda f: f.__setitem__(3, f[3] | 1)),
    "an encrypted storage": lambda: _listed(lambda f: f.__setitem__(3, f[3] | 1), 3),
    "method 99": lambda: _listed(_set(4, 99)),
    "a size of 4 GB": lambda: _listed(lambda f: (f.__setitem__(8, 0xFFFFFFF0), f.__setitem__(9, 0xFFFFFFF0)) and None),
    "two sizes": lambda: _listed(_set(9, 7)),
    "a local header at 4 GB": lambda: _listed(_set(16, 0xFFFFFFF0)),
    "a local header with another name": lambda: _changed(b"archive/data.pkl", b"archive/dota.pkl"),
    "a directory name that differs": lambda: _changed(b"archive/data.pkl", b"brchive/data.pkl", nth=2),
    "zip64 sizes of 2^63": lambda: _zip64((1 << 63, 1 << 63)),
    "zip64 sizes of 2^64-1": lambda: _zip64(((1 << 64) - 1,) * 2),
    "a zip64 offset of 2^63": lambda: _zip64((100, 100, 1 << 63)),
    "zip64 without its numbers": lambda: _zip64(()),
    "a directory of 60,000 records": lambda: _huge_directory(60_000),
    "a directory of 300,000 records": lambda: _huge_directory(300_000),
    "counts without records": lambda: base.archive()[:-22] + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 60000, 60000, 100, 0, 0),
    "a directory at 4 GB": lambda: base.archive()[:-22] + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, 46, 0xFFFFFFF0, 0),
    "several disks": lambda: base.archive()[:-22] + struct.pack("<IHHHHIIH", 0x06054B50, 3, 0, 1, 9, 46, 0, 0),
    "bytes between directory and end": lambda: base.archive()[:-22] + b"\0" * 8 + base.archive()[-22:],
    "no end": lambda: base.archive()[:-22],
    "many ends": lambda: base.archive()[:-22] + b"PK\5\6" * 15_000,
    "the first half": lambda: base.archive()[: len(base.archive()) // 2],
    "a byte order of a megabyte": lambda: base.packed([*_records(), ("archive/byteorder", b"x" * 1_000_000)]),
    "big-endian": lambda: base.packed([*_records(), ("archive/byteorder", b"big")]),
    "TorchScript": lambda: base.packed([*_records(), ("archive/constants.pkl", b"\x80\x02).")]),
    "names with terminal codes": lambda: base.packed([("\x1b[2J/data.pkl", base.state()), ("\x1b[2J/x", b"")]),
}  # fmt: skip


def _built(data: Callable[[], bytes]) -> Callable[[Path], Path]:
    return lambda folder: base.torch_folder(folder, data())


def _calling(folder: Path, call: Callable[[str], bytes], *, beside: bool = True) -> Path:
    """A model with a call beside it, or the call alone; the canary lies outside, where the harness sees a change."""
    asked = call(f"touch '{folder.parent}/canary'")
    return base.torch_folder(
        folder, base.archive(base.state(base.text("extra") + asked) if beside else b"\x80\x02" + asked + b".")
    )


def cases() -> Iterator[Case]:
    """Every torch file."""
    for name, call in CALLS.items():
        yield Case(f"pickle calls {name}", lambda folder, call=call: _calling(folder, call, beside=False))  # type: ignore[misc]
        yield Case(f"pickle calls {name}, beside a model", lambda folder, call=call: _calling(folder, call))  # type: ignore[misc]
    for name, call in HARMLESS.items():
        everything = frozenset(("inspect", "validate", "to-scratch", "to-gguf", "diff", "diagnose"))
        yield Case(f"pickle with {name}, beside a model", lambda f, c=call: _calling(f, c), passes=everything)  # type: ignore[misc]
    for name, tree in TREES.items():
        yield Case(f"pickle: {name}", _built(lambda tree=tree: base.archive(tree())))  # type: ignore[misc]
    yield Case("pickle: every operation", _built(lambda: base.archive(_every_opcode())))
    for name, tree in TENSORS.items():
        seen = frozenset(("inspect",)) if "zero, 2^50" in name else frozenset()  # a view; its shape is wrong, too
        yield Case(f"torch tensor: {name}", _built(lambda tree=tree: base.archive(tree())), passes=seen)  # type: ignore[misc]
    for name, data in ARCHIVES.items():
        yield Case(f"zip: {name}", _built(data))
    yield Case(
        "zip: wrong CRC of a storage",
        _built(lambda: _listed(_set(7, 12345), 3)),
        ("inspect", "validate", "scan", "to-scratch", "to-gguf"),
        # Read by conversions, and where all bytes are (`validate --scan`, `--hash`).
        passes=frozenset(("inspect", "validate", "diff", "diagnose")),
        more=("diff", "check", "diagnose"),
    )
    yield Case("torch: a bare pickle", _built(lambda: b"\x80\x02cos\nsystem\nX\4\0\0\0true\x85R."))
    yield Case("torch: before 1.6", _built(lambda: b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."))
    yield Case("torch: zeros of 3 GB", lambda f: base.hf(f, name="x.bin") and hole(f / "x.bin", 3 << 30) and f)
