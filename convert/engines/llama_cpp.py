"""Runs a GGUF file in real llama.cpp, in a subprocess, and returns its log-probabilities.

llama.cpp comes prebuilt from PyPI (``xllamacpp``, the extra ``llamacpp``). It can abort the process it runs in, on a
file without vocabulary for instance; such a file is run as a temporary copy with a placeholder one (token ids go
in and come out, so its texts do not matter). This module compares nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from convert.errors import ConvertError, Problem
from convert.formats import gguf
from convert.formats.gguf_edit import plan_edit
from convert.formats.gguf_header import read_header
from convert.formats.spec import Container

NAME = "llama.cpp"
PACKAGE = "xllamacpp"
#: Seconds; a model of 135M parameters takes 5, and loading a large one may take minutes.
TIMEOUT = 1800.0

_CHILD = Path(__file__).with_name("llama_cpp_child.py")
#: What llama.cpp's converter writes for a model without tokenizer; both abort when a server is made of them.
_NO_VOCABULARY = (None, "none", "no_vocab")
_EMBEDDING = "token_embd.weight"
_COPY = 8 << 20


def available() -> bool:
    """Whether llama.cpp is installed here (found without importing it)."""
    return importlib.util.find_spec(PACKAGE) is not None


def logprobs(
    path: Path | str, prompts: Sequence[Sequence[int]], *, timeout: float = TIMEOUT, threads: int | None = None
) -> np.ndarray:
    """Log-probabilities of the token after each prompt, as llama.cpp computes them.

    On the CPU, with flash attention off and keys and values cached in float32. Nothing is put before the
    prompts (no bos token).

    Args:
        path: A GGUF file; of a split model, any piece.
        prompts: Token ids, at least one each. Prompts that continue each other cost only what they add.
        timeout: Seconds after which llama.cpp is stopped.
        threads: Threads it computes with; unless given, one per processor.

    Returns:
        float32 ``[len(prompts), V]``, natural logarithms over the whole vocabulary. llama.cpp takes them of float32
        probabilities, so below -87 they lose precision, and from -104 on they are -inf.

    Raises:
        FormatError: The file is no sound GGUF file.
        ConvertError: llama.cpp is not installed, refuses the file, crashes, or takes too long; with its last words.
    """
    if not available():
        raise ConvertError(
            Problem(
                "engine_missing",
                f"llama.cpp is not installed here: there is no Python package {PACKAGE}.",
                wanted=PACKAGE,
                hint=f"pip install --no-deps {PACKAGE} (prebuilt, 34 MB; the extra `llamacpp` of this package).",
            )
        )
    container = gguf.read(Path(path))
    size = vocab_size(container)
    prompts = [[int(i) for i in prompt] for prompt in prompts]
    _check_prompts(prompts, size)
    if not prompts:
        return np.empty((0, size), np.float32)
    with tempfile.TemporaryDirectory(prefix="convert-llama-cpp-") as name:
        folder = Path(name)
        with _runnable(container, folder, size) as file:
            request = {
                "path": str(file.resolve() if len(container.files) == 1 else file),
                "prompts": prompts,
                "vocab_size": size,
                "printable": printable_token(container),
                "out": str(folder / "logprobs.npy"),
                "threads": threads or os.cpu_count() or 1,
            }
            _run(request, Path(path), folder, timeout)
        return np.load(folder / "logprobs.npy")


def _without_vocabulary(container: Container) -> bool:
    return container.metadata.get("tokenizer.ggml.model") in _NO_VOCABULARY


def vocab_size(container: Container) -> int:
    """Rows of the embedding, which is what llama.cpp calls the vocabulary.

    Raises:
        ConvertError: The file has no embedding: it is no language model, or not a whole one.
    """
    spec = container.tensors.get(_EMBEDDING)
    if spec is None:
        raise ConvertError(
            Problem(
                "missing_tensor",
                f"{container.files[0].name} has no {_EMBEDDING!r}, so llama.cpp cannot run it.",
                tensor=_EMBEDDING,
                file=str(container.files[0]),
            )
        )
    return int(spec.shape[0])


def printable_token(container: Container) -> int:
    """The id of a token that is whole, plain text; 97 (``a``) of a placeholder vocabulary."""
    types = container.metadata.get("tokenizer.ggml.token_type") or ()
    for index, text in enumerate(container.metadata.get("tokenizer.ggml.tokens") or ()):
        if text.isascii() and text.isalnum() and (index >= len(types) or types[index] == 1):
            return index
    return min(97, vocab_size(container) - 1) if _without_vocabulary(container) else 0


def _check_prompts(prompts: Sequence[Sequence[int]], size: int) -> None:
    wrong = sorted({i for prompt in prompts for i in prompt if not 0 <= i < size})
    if wrong or not all(prompts):
        what = f"token ids {wrong[:5]} are outside the vocabulary of {size}" if wrong else "a prompt is empty"
        raise ConvertError(Problem("tokens", f"llama.cpp cannot be asked: {what}.", found=wrong[:5]))


# ---- a file that llama.cpp can load --------------------------------------------------------------------------------


@contextmanager
def _runnable(container: Container, folder: Path, size: int) -> Iterator[Path]:
    """The file itself, or, where it has no vocabulary, a copy with a placeholder one."""
    first = container.files[0]
    if not _without_vocabulary(container):
        yield first
        return
    needed, free = first.stat().st_size, shutil.disk_usage(folder).free
    if needed > free:
        raise ConvertError(
            Problem(
                "disk",
                f"{first.name} has no vocabulary, and llama.cpp needs one; the temporary copy that gets a placeholder "
                f"needs {needed:,} bytes, {folder.parent} has {free:,} free.",
                file=str(first),
                found=free,
                wanted=needed,
                hint="Set TMPDIR to a place with more room, or export the model with its tokenizer.",
            )
        )
    copy = folder / first.name
    _copy_with_vocabulary(first, copy, size)
    for other in container.files[1:]:
        (folder / other.name).symlink_to(other.resolve())
    try:
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def _copy_with_vocabulary(source: Path, target: Path, size: int) -> None:
    """Write ``source`` with the placeholder's keys; the data is streamed."""
    from convert.tokenizer.to_gguf import placeholder_metadata

    stated = read_header(source).metadata
    changes = {key: None for key in stated if key.startswith("tokenizer.")} | placeholder_metadata(size)
    edit = plan_edit(source, changes, room=0)
    with source.open("rb") as data, target.open("xb") as out:
        out.write(edit.head)
        data.seek(edit.header.data_start)
        shutil.copyfileobj(data, out, _COPY)


# ---- the subprocess ------------------------------------------------------------------------------------------------


def _run(request: dict[str, object], shown: Path, folder: Path, timeout: float) -> None:
    log = folder / "stderr"
    command = [sys.executable, "-P", str(_CHILD)]  # -P: the script's own folder is no place to import from
    with log.open("wb") as stderr:
        try:
            done = subprocess.run(
                command,
                input=json.dumps(request).encode(),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConvertError(
                Problem(
                    "engine_timeout",
                    f"llama.cpp did not finish with {shown.name} in {timeout:g} s and was stopped.",
                    file=str(shown),
                    hint="Use fewer tokens.",
                )
            ) from None
    if done.returncode or not Path(str(request["out"])).is_file():
        raise _failure(done.returncode, log.read_text(encoding="utf-8", errors="replace"), shown)


def _failure(code: int, log: str, shown: Path) -> ConvertError:
    """Why there is no answer, in llama.cpp's own last words."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    own = [line.removeprefix("ENGINE ") for line in lines if line.startswith("ENGINE ")]
    telling = [line for line in lines if any(word in line.lower() for word in ("error", "failed", "assert", "abort"))]
    said = [*own, *dict.fromkeys(telling[:3])] or lines[-1:] or ["nothing"]
    how = f"was ended by {_signal(-code)}" if code < 0 else f"ended with code {code}"
    return ConvertError(
        Problem(
            "engine",
            f"llama.cpp could not run {shown.name}: its process {how}. It said: {'; '.join(said)[:600]}.",
            file=str(shown),
            found=code,
            hint="`convert validate` tells what is wrong with the file; a new type or architecture may need a newer "
            f"{PACKAGE}.",
        )
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
