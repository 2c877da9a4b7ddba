"""The reader of each container format, by the format's name; imported when it is used."""

from __future__ import annotations

from pathlib import Path

from convert.formats.spec import Container


def read_container(path: Path, format: str) -> Container:
    """The headers of one file.

    Args:
        path: The file.
        format: ``safetensors``, ``torch`` or ``gguf``. The tensors of a torch file lie in ``metadata["tree"]``.

    Raises:
        FormatError: The file is not what the format asks for.
    """
    if format == "safetensors":
        from convert.formats import safetensors

        return safetensors.read(path)
    if format == "tensorflow":
        from convert.formats import tf_checkpoint

        return tf_checkpoint.read(path)
    if format == "dcp":
        from convert.formats import dcp

        return dcp.read_file(path)
    if format == "gguf":
        from convert.formats import gguf

        return gguf.read(path)
    from convert.formats import torch_zip

    return torch_zip.read(path)
