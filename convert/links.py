"""Links in a checkpoint's folder: those that lead out of it are followed only where that is known to be meant.

A folder from a stranger may hold ``model-2.safetensors`` or ``tokenizer.json`` as a link to a file of the reader's own:
a conversion would put that into its output. Links of a Hugging Face cache, within the folder, and within a git work
tree (git-annex, DVC, datalad) are what such links are made for; others the user must allow. What a user names himself
is never judged here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from convert.errors import ConvertError, Problem

#: What is read or copied beside weights, by the end of its name.
_SIDE_FILES = (".json", ".model", ".tiktoken", ".txt", ".bpe", ".jinja", ".chk", ".sha256", ".sha256sum", "readme.md")
_REPOSITORY = ("models--", "datasets--", "spaces--")
_HEX = frozenset("0123456789abcdef")


def refuse_side_links(folder: Path) -> None:
    """Stop where a config, index, record or tokenizer file of a folder is a link that leads out of it.

    Raises:
        ConvertError: With every such link, its target, and the ways out.
    """
    inside = [*_entries(folder), *sorted((folder / "additional_chat_templates").glob("*"))]  # or all of it is a link
    refuse_links((p for p in inside if p.name.lower().endswith(_SIDE_FILES)), folder)
    if (folder / "params.json").is_file():  # Meta's download keeps one tokenizer for all sizes, a level up
        above = folder.absolute().parent
        refuse_links((p for p in _entries(above) if p.name.startswith("tokenizer")), above)


def refuse_weight_links(src: Path, *, ends: tuple[str, ...], skip: tuple[str, ...]) -> None:
    """Stop where weights that go with ``src`` are links that lead out, before their first bytes are looked at.

    An error about a file that is no weights quotes its beginning, and pieces of a GGUF or TensorFlow checkpoint are
    found by its reader. A file that stands for itself alone has no such company.

    Args:
        src: A folder, or one of its files.
        ends: Suffixes of weights.
        skip: How names begin that are never read.

    Raises:
        ConvertError: With every such link, its target, and the ways out.
    """
    folder = src if src.is_dir() else src.parent
    whole = src.is_dir() or src.suffix in (".json", ".index") or "-of-" in src.name or any(folder.glob("*.index.json"))
    weights = (p for p in _entries(folder) if p.suffix in ends or p.suffix.startswith(".data-"))
    if whole:
        refuse_links((p for p in weights if p != src and not p.name.startswith(skip)), folder)


def refuse_links(paths: Iterable[Path], folder: Path) -> None:
    """Stop where one of the files in ``folder`` is a link that leads out of it, and no known kind of store keeps it.

    Raises:
        ConvertError: With every such link, its target, and the ways out.
    """
    root = folder.resolve()
    problems = []
    for path in paths:
        if not path.is_file() or path.resolve().is_relative_to(root):  # a loop of links is no file, and has no end
            continue
        target = path.resolve()
        step = _first_step(path)
        blob = _is_blob(target) or (_is_blob(step) and not step.is_symlink())  # a blob is a file, no link to anywhere
        if not (blob or _same_work_tree(root, target)):
            problems.append(
                Problem(
                    "link",
                    f"{path.name} is a link that leads out of its folder, to {target}. In a folder from somebody else "
                    "such a link can make a private file of yours part of the output.",
                    file=str(path),
                    found=str(target),
                    wanted="a file in the folder, a blob of a Hugging Face cache, or one of the same git work tree",
                    hint="If that is what you want, say --follow-links (follow_links=True), or copy the folder with "
                    "links followed (cp -rL); else fetch the file again.",
                )
            )
    if problems:
        raise ConvertError(problems)


def _first_step(path: Path) -> Path:
    """Where a link points by its own words: the blobs of a cache may themselves lie on another disk, behind a link."""
    return Path(os.path.normpath(path.absolute().parent / path.readlink())) if path.is_symlink() else path


def _entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_symlink()) if folder.is_dir() else []


def _is_blob(target: Path) -> bool:
    """Whether it is a file of the Hub client's cache: a blob, the store that all models share, or a snapshot's file.

    ``models--ORG--NAME/blobs/ETAG``; ``blobs/ab/ab…`` (64 digits, beside the models' folders); and, where links are
    switched off, ``models--ORG--NAME/snapshots/REVISION/…`` (huggingface_hub 1.x, ``file_download``,
    ``_shared_blobs``).
    """
    known = len(target.name) in (40, 64) and set(target.name) <= _HEX
    if known and target.parent.name == "blobs" and target.parent.parent.name.startswith(_REPOSITORY):
        return True
    if target == target.resolve() and any(
        p.name == "snapshots" and p.parent.name.startswith(_REPOSITORY) for p in target.parents
    ):
        return True
    prefix, store = target.parent.name, target.parent.parent
    return (
        store.name == "blobs"
        and len(target.name) == 64
        and set(target.name) <= _HEX
        and target.name.startswith(prefix)
        and len(prefix) == 2
    )


def _same_work_tree(root: Path, target: Path) -> bool:
    """Whether both lie in one git repository; a home that is one as a whole holds keys beside its models."""
    tree = next((p for p in (root, *root.parents) if (p / ".git").exists()), None)
    return tree is not None and target.is_relative_to(tree) and not Path.home().resolve().is_relative_to(tree)
