"""Which names a model's pickle has no honest use for, because they run programs, import, unpickle or rebuild code.

A pickle names Python objects and has them called when ``torch.load`` opens it without ``weights_only``. Names are only
read here (:mod:`convert.formats.dangerous_calls` looks at the calls). The rule goes by what a name is: all of Python's
standard library is refused but for what plain data is made of; so are torch and numpy but for their data and modules;
of other packages, those that run, fetch, import or unpickle things, and every path that leads through a module into
another one. A class of the user's own, or of a trainer, passes: what that does nobody can tell from its name.
"""

from __future__ import annotations

import _compat_pickle
import builtins
import sys


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Modules of Python 2, and those that newer Pythons have removed: as reserved as today's.
_GONE = _words("""__builtin__ asynchat asyncore audioop cgi cgitb chunk commands compiler copy_reg crypt dbhash dircache
distutils dl dumbdbm dummy_thread fpformat gdbm getopt htmlentitydefs htmllib httplib ihooks imp imputil lib2to3
mailcap md5 mimetools mimify msilib multifile mutex new nis nntplib os2 ossaudiodev pipes popen2 posixfile rexec rfc822
sets sgmllib sha smtpd sndhdr spwd statvfs sunau telnetlib thread urllib2 urlparse uu xdrlib xmllib xmlrpclib
_dummy_thread _imp _interpreters _sitebuiltins _xxsubinterpreters cPickle cStringIO StringIO""")
_LIBRARY = (
    sys.stdlib_module_names
    | frozenset(_GONE)
    | frozenset(name.partition(".")[0] for name in _compat_pickle.IMPORT_MAPPING)
)

_DATA = _words("""bool int float complex str bytes bytearray list tuple set frozenset dict range slice object type
Ellipsis NotImplemented abs all any ascii bin chr divmod enumerate format hash hex id iter len max min oct ord print
repr reversed round sorted sum zip""")
_ERRORS = [name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)]
_PATHS = "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"
_FUNCTIONS = """abs add and_ concat contains eq floordiv ge getitem gt inv invert is_ is_not le lshift lt matmul mod mul
ne neg not_ or_ pos pow rshift sub truediv truth xor"""
#: What is harmless of the standard library; ``*`` stands for all classes, or functions of mathematics. What
#: ``getattr`` is given is looked at where it is called.
_HARMLESS: dict[str, frozenset[str]] = {
    module: frozenset(names.split() if isinstance(names, str) else names)
    for module, names in {
        "builtins": [*_DATA, *_ERRORS, "getattr"],
        "collections": "OrderedDict defaultdict deque Counter ChainMap UserDict UserList UserString",
        "collections.abc": "*",
        "argparse": "Namespace",
        "optparse": "Values",
        "array": "array _array_reconstructor",
        "datetime": "date datetime time timedelta timezone tzinfo UTC",
        "zoneinfo": "ZoneInfo ZoneInfo._unpickle",
        "time": "struct_time time perf_counter monotonic",
        "decimal": "*",
        "fractions": "Fraction",
        "numbers": "*",
        "math": "*",
        "cmath": "*",
        "statistics": "mean fmean median mode stdev pstdev variance pvariance NormalDist",
        "uuid": "UUID SafeUUID SafeUUID.safe SafeUUID.unsafe SafeUUID.unknown",
        "ipaddress": "IPv4Address IPv6Address IPv4Network IPv6Network IPv4Interface IPv6Interface",
        "pathlib": _PATHS,
        "pathlib._local": _PATHS,
        "enum": "Enum IntEnum StrEnum Flag IntFlag auto",
        "types": "SimpleNamespace MappingProxyType NoneType GenericAlias UnionType EllipsisType NotImplementedType",
        "typing": "*",
        "dataclasses": "Field InitVar FrozenInstanceError KW_ONLY MISSING _FIELD_BASE _MISSING_TYPE _KW_ONLY_TYPE "
        "_HAS_DEFAULT_FACTORY_CLASS _DataclassParams",
        "random": "Random",
        "operator": _FUNCTIONS,
        "_operator": _FUNCTIONS,
        "functools": "partial reduce",
        "_functools": "partial reduce",
        "copyreg": "_reconstructor __newobj__ __newobj_ex__",
        "_codecs": "encode",
        "itertools": "count cycle repeat chain islice product permutations combinations zip_longest",
        "io": "BytesIO StringIO",
        "_io": "BytesIO StringIO",
        "re": "_compile compile RegexFlag RegexFlag.IGNORECASE",
        "abc": "ABC",
        "logging": "getLogger Logger RootLogger LogRecord LoggerAdapter",
        "inspect": "Signature Parameter _empty _ParameterKind",
        "configparser": "ConfigParser RawConfigParser SectionProxy ConverterMapping BasicInterpolation "
        "ExtendedInterpolation Interpolation LegacyInterpolation",
        "contextlib": "nullcontext",
        "_weakrefset": "WeakSet",
        "weakref": "WeakSet WeakKeyDictionary WeakValueDictionary",
    }.items()
}
#: Of modules with ``*``, what makes classes or evaluates texts all the same.
_NOT = frozenset(_words("ABCMeta NamedTuple TypedDict NewType get_type_hints localcontext"))

_CATEGORIES = {
    "starts programs": "os posix nt subprocess _posixsubprocess commands popen2 pty multiprocessing _multiprocessing "
    "concurrent signal _signal pipes mailcap webbrowser antigravity venv ensurepip _winapi _osx_support platform "
    "ctypes _ctypes pip easy_install setuptools pkg_resources _distutils_hack distutils wheel pexpect ptyprocess sh "
    "plumbum fabric invoke psutil docker execnet cffi _cffi_backend pyximport Cython win32api win32com "
    "win32process pythoncom pywintypes celery ansible",
    "executes code": "code codeop runpy timeit profile cProfile trace bdb pdb doctest pydoc idlelib lib2to3 "
    "unittest _interpreters _xxsubinterpreters _testcapi compileall py_compile IPython ipykernel ipdb pudb debugpy "
    "pydevd _pydevd_bundle jupyter_client nbclient nbconvert pytest _pytest py nose hypothesis sympy mpmath jinja2 "
    "mako asteval numexpr RestrictedPython execjs js2py",
    "imports by name": "importlib imp _imp _frozen_importlib _frozen_importlib_external pkgutil zipimport modulefinder "
    "ihooks site sys gc inspect six future past lazy_loader "
    "sitecustomize usercustomize",
    "rebuilds code": "types marshal new ast dis opcode dill _dill cloudpickle numba",
    "unpickles without restriction": "pickle _pickle cPickle pickletools shelve joblib jsonpickle klepto yaml "
    "_yaml ruamel",
    "reaches the network": "socket _socket ssl _ssl http httplib urllib urllib2 ftplib smtplib imaplib poplib "
    "telnetlib nntplib xmlrpc xmlrpclib socketserver asyncio asyncore select selectors requests urllib3 httpx httpcore "
    "aiohttp websocket websockets paramiko boto3 botocore s3fs gcsfs zmq tornado twisted gevent eventlet trio anyio "
    "aiofiles selenium huggingface_hub httpcore2 httpx2 kubernetes",
    "touches files": "io _io shutil tempfile glob fileinput linecache tarfile zipfile mmap sqlite3 _sqlite3 dbm gzip "
    "bz2 lzma fsspec filelock fcntl",
}
_WHY = {name: why for why, names in _CATEGORIES.items() for name in names.split()}
#: Of other packages, parts that do such things although the package as a whole does not.
_PARTS = {
    "hydra.utils": "imports by name",
    "hydra._internal": "imports by name",
    "networkx.utils": "rebuilds code",
    "transformers.dynamic_module_utils": "imports by name",
    "transformers.utils.import_utils": "imports by name",
    "pydantic.types.ImportString": "imports by name",
    "test.support": "starts programs",
    "test.libregrtest": "starts programs",
    "transformers.commands": "starts programs",
    "transformers.testing_utils": "starts programs",
    "transformers.utils.hub": "reaches the network",
    "accelerate.commands": "starts programs",
    "accelerate.launchers": "starts programs",
    "accelerate.test_utils": "starts programs",
    "PIL.EpsImagePlugin": "starts programs",
    "PIL.ImageGrab": "starts programs",
    "PIL.ImageMath": "executes code",
    "PIL.ImageShow": "starts programs",
}
#: As a part of any package's path, these are the module of that name, or a copy that the package carries.
_CARRIED = frozenset(
    _words(
        "os posix nt sys subprocess builtins __builtin__ importlib imp ctypes cffi marshal pickle _pickle cPickle "
        "socket shutil pty runpy cloudpickle dill joblib pip distutils setuptools pkg_resources six multiprocessing"
    )
)
_KNOWN_AS = frozenset(_words("np numpy torch th pd pandas tf tensorflow sp osp pkl plt jnp jax"))

#: Where torch keeps modules, optimizers, and what its tensors are rebuilt with; ``X*`` any name that begins so.
_TORCH_TREES = tuple(
    f"torch.{name}"
    for name in _words(
        "nn optim amp cuda.amp distributions ao.quantization ao.nn ao.pruning quantization utils.data "
        "return_types sparse masked functional special linalg fft nested storage types torch_version _C._nn "
        "_C._special _C._linalg _C._fft _C._sparse"
    )
)
#: Where only classes are of data.
_TORCH_CLASSES = ("torch.distributed",)
_TORCH_NOT = tuple(
    f"torch.{name}"
    for name in _words(
        "ao.quantization.fx ao.quantization.pt2e utils.data.datapipes distributed.rpc distributed.elastic "
        "distributed.launch distributed.launcher distributed.run distributed.nn distributed.distributed_c10d "
        "distributed.checkpoint distributed.argparse_util distributed.rendezvous distributed._tools"
        " distributed.debug distributed._shard.checkpoint"
        " distributed.autograd"
    )
)
_TORCH_NAMES = {
    "torch._utils": ("_rebuild*", "ExceptionWrapper"),
    "torch._tensor": ("_rebuild*",),
    "torch.serialization": ("_get_layout",),
    "torch._C": ("Generator", "_VariableFunctionsClass"),
    "torch._C._distributed_c10d": ("ReduceOp", "RedOpType"),
    "torch.distributed.distributed_c10d": ("ReduceOp", "Backend"),
    "torch.distributed.checkpoint.metadata": ("*",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.utils.hooks": ("RemovableHandle", "BackwardHook"),
    "torch.autograd": ("Variable",),
    "torch.autograd.variable": ("Variable",),
    "torch.fx.immutable_collections": ("immutable_list", "immutable_dict"),
}
_TORCH_TOP_NOT = frozenset(
    _words(
        "load save compile hub jit ops classes package serialization utils multiprocessing from_file _dynamo _inductor "
        "distributed export fx backends cpp overrides import_ir_module eval_frame map cond vmap while_loop"
    )
)
_NUMPY_TREES = ("numpy.random", "numpy.ma.core", "numpy.matrixlib.defmatrix", "numpy.dtypes", "numpy.polynomial")
_NUMPY_NAMES = frozenset(
    _words("_reconstruct scalar _frombuffer _convert_to_stringdtype_kwargs recarray record ndarray dtype _NoValueType")
)
_NUMPY_TOP_NOT = frozenset(
    _words(
        "load save savez savez_compressed savetxt loadtxt genfromtxt fromfile fromregex memmap DataSource frompyfunc "
        "vectorize apply_along_axis apply_over_axes piecewise fromfunction fromiter test f2py ctypeslib lib testing "
        "distutils core _core show_config info lookfor source deprecate byte_bounds"
    )
)

#: What a function says of itself when it is called: no class of data is called so.
_VERBS = frozenset(
    _words(
        "load loads eval exec execfile evaluate system popen Popen spawn run call check_call check_output open fopen "
        "import_module locate find_class unsafe_load full_load from_pretrained from_file save savez tofile dump "
        "to_pickle instantiate sympify parse_expr urlopen urlretrieve wget download install main remove unlink rmtree "
        "rmdir makedirs mkdir symlink copyfile copytree write save_pretrained Unpickler FileIO CDLL runstring shell "
        "command attrgetter methodcaller namedtuple FunctionType CodeType ModuleType NamedTemporaryFile mkstemp "
        "mkdtemp TemporaryDirectory ProcessPoolExecutor ThreadPoolExecutor ThreadingHTTPServer "
        "HTTPServer get_type_hints start pipeline ZipFile TarFile TCPStore FileStore FileLock"
    )
)
#: Packages of whose objects pickles name classes, and functions that are kept, but none that is called.
_NO_FUNCTIONS = frozenset(
    _words(
        "transformers accelerate peft trl datasets evaluate PIL matplotlib networkx torchgen safetensors tokenizers "
        "tqdm attr attrs click typer rich prompt_toolkit pygments traitlets jsonschema docutils parso jedi executing "
        "stack_data pyparsing fontTools packaging wandb tensorboard gguf sentencepiece typing_extensions omegaconf "
        "torchvision torchaudio hydra decorator wrapt"
    )
)
#: Functions and lower-case classes of torch and numpy that pickles of data call, without underscores before them.
_REBUILD = frozenset(
    _words(
        "scalar reconstruct frombuffer convert_to_stringdtype_kwargs mareconstruct dtype ndarray recarray record "
        "matrix void datetime64 timedelta64 str_ bytes_ bool_ get_layout refresh_per_optimizer_state "
        "get_thnn_function_backend device"
    )
)
_REBUILD_BEGIN = ("rebuild", "pyx_unpickle", "float", "int", "uint", "complex")
_RETURNED = "torch.return_types."
_VERBS_BEGIN = _words("load_ read_ open_ exec_ eval_ run_ download_ import_ spawn_ save_ write_ execute_")


def reason(module: str, name: str, *, of_instance: bool = False) -> str | None:
    """Why a name does not belong in a model's pickle, in two or three words; None where it may.

    Args:
        module: The module as the pickle names it, in the spelling of either Python.
        name: The name in it, dotted for what lies in a class.
        of_instance: The last part of the name is an attribute of an instance of the rest.
    """
    module, name = _today(module, name)
    parts, path = module.split("."), name.split(".")
    if not f"{module}.{name}".isprintable() or not all((*parts, *path)) or any(c in module + name for c in "/\\: "):
        return "is no name that Python writes"
    top = parts[0]
    if any(_magic(part) for part in (*parts[1:], *path)) or (_magic(top) and top not in ("__main__", "__mp_main__")):
        return "reaches into Python's inner workings"
    if top in _LIBRARY:
        allowed = _HARMLESS.get(module, frozenset())
        harmless = name in allowed or ("*" in allowed and (top.endswith("math") or _a_class(name)) and name not in _NOT)
        harmless = harmless and (name not in _LIBRARY or name in allowed)
        return None if harmless else _WHY.get(top, "is a part of Python that no model is made of")
    for end in range(1, len(parts) + 1):
        if why := _PARTS.get(".".join(parts[:end])):
            return why
    if why := _WHY.get(top) or _PARTS.get(f"{module}.{name}"):
        return why
    through = path[:-1] if of_instance or (len(path) > 1 and _a_class(path[0])) else path
    own = top in ("torch", "numpy")  # what lies in these is known one by one
    for part in (*parts[1:] * (not own), *through):
        if part in _CARRIED:
            return _WHY.get(part, "reaches into another module")
    if any(part in _LIBRARY or part in _WHY or part in _KNOWN_AS for part in path[:-1]):
        if top == "torch" and len(path) == 2 and path[0] == "torch":  # torch.contiguous_format, of torch._utils
            return _torch("torch", path[1:])
        return "reaches into another module"
    if not own and name in _WHY and not of_instance:
        return "names another module"
    if len(path) > 1 and not _a_class(path[0]) and top != "__main__" and not of_instance:
        return "reaches into another module"
    return _torch(module, path) if top == "torch" else _numpy(module, path) if top == "numpy" else None


def reason_called(name: str) -> str | None:
    """Why nobody should call a function of this dotted name, of a package that is not known otherwise; or None."""
    last = name.rpartition(".")[2]
    bare = last.lstrip("_")
    top = name.partition(".")[0]
    if top in _NO_FUNCTIONS and bare[:1].islower():
        return "calls a function, where only classes are of data"
    if (
        top in ("torch", "numpy")
        and bare[:1].islower()
        and not (
            bare in _REBUILD or bare.startswith(_REBUILD_BEGIN) or bare.endswith("_ctor") or name.startswith(_RETURNED)
        )
    ):
        return "calls a function that rebuilds no tensor"
    if bare in _VERBS or bare.startswith(_VERBS_BEGIN):
        return "loads, runs or writes something when called"
    return None


def _today(module: str, name: str) -> tuple[str, str]:
    """Python 2's names in Python 3's spelling, as Python's own unpickler translates them."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _magic(part: str) -> bool:
    return len(part) > 4 and part.startswith("__") and part.endswith("__") and part != "__new__"


def _a_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper() and "." not in name


def _nested(path: list[str]) -> bool:
    """Classes in classes, and members of enumerations: no methods."""
    return all(map(_a_class, path)) or path[-1] == "__new__"


def _under(module: str, trees: tuple[str, ...]) -> bool:
    return any(module == tree or module.startswith(f"{tree}.") for tree in trees)


def _torch(module: str, path: list[str]) -> str | None:
    why = "is a part of torch that no checkpoint is made of"
    if module == "torch.storage" and path == ["_load_from_bytes"]:
        return "calls torch.load on a file inside the pickle"
    if module == "torch._C" and path[0] == "_VariableFunctionsClass":
        return why if path[-1] in ("from_file", "save", "load") or len(path) > 2 else None
    if len(path) > 1 and not _nested(path):
        return why
    if module in ("torch", "torch.cuda"):
        return why if path[0] in _TORCH_TOP_NOT else None
    names = _TORCH_NAMES.get(module, ())
    if any(path[0] == name or (name[-1] == "*" and path[0].startswith(name[:-1])) for name in names):
        return None
    data = _under(module, _TORCH_TREES) or (_under(module, _TORCH_CLASSES) and _a_class(path[0]))
    return None if data and not _under(module, _TORCH_NOT) and path[0] not in _VERBS else why


def _numpy(module: str, path: list[str]) -> str | None:
    why = "is a part of numpy that no checkpoint is made of"
    if len(path) > 1 and not _nested(path):
        return why
    if module == "numpy":
        return why if path[0] in _NUMPY_TOP_NOT else None
    if path[0] == "test" or (module == "numpy.ma" and not _a_class(path[0])):
        return why
    if (
        module == "numpy.ma"
        or _under(module, _NUMPY_TREES)
        or (_under(module, ("numpy.core", "numpy._core", "numpy.rec")) and path[0] in _NUMPY_NAMES)
    ):
        return None
    return why
