"""Which files of a repository are needed: one set of weights, and the small files that belong to it.

safetensors before ``.bin`` before GGUF; Meta's own files (``original/``) where that layout is asked for. Everything is
decided from the tree's names and sizes; of an index of shards the caller brings the contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from convert.carried import CARRIED
from convert.errors import ConvertError, Problem
from convert.hub.repository import RemoteFile, Repository
from convert.locate import CONFIG_NAMES, INDEX_NAMES, NOT_WEIGHTS, RECORD_NAME
from convert.report import human_bytes

ORIGINAL = "original"
#: How the weights of one save are usually called: alone, or what comes before the number of a shard.
_USUAL = ("model.safetensors", "model", "pytorch_model.bin", "pytorch_model")
#: Beside those that are carried: what says what the model is, and its card.
_SMALL = (*CARRIED, *CONFIG_NAMES, *INDEX_NAMES, RECORD_NAME, "hparams.json", "README.md", "tiktoken.model")
_SMALL_MOST = 100 << 20


@dataclass(slots=True)
class Selection:
    """What is needed.

    Attributes:
        folder: In the repository; ``""`` for its root.
        weights: The weight files.
        small: Config, tokenizer, generation config, chat templates, index, record, card.
        notes: What was left alone.
    """

    folder: str
    weights: list[RemoteFile]
    small: list[RemoteFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[RemoteFile]:
        """All of them."""
        return [*self.small, *self.weights]


def index_of(repository: Repository, *, layout: str | None = None) -> RemoteFile | None:
    """The index of shards that decides which files are weights, if there is one to be read."""
    folder, only = _where(repository, layout)
    if only is not None and only.name not in INDEX_NAMES:
        return None
    if only is not None:
        return only
    return next((f for n in INDEX_NAMES if (f := _at(repository, folder, n))), None)


def select(
    repository: Repository, *, layout: str | None = None, weight_map: Mapping[str, str] | None = None
) -> Selection:
    """Choose the files.

    Args:
        repository: What there is.
        layout: The layout that was asked for; ``meta`` takes ``original/``.
        weight_map: Tensor → file, of the index of shards.

    Raises:
        ConvertError: There are no weights, or several sets of which one must be named.
    """
    folder, only = _where(repository, layout)
    here = {f.name: f for f in _in(repository, folder)}
    chosen = Selection(folder, _weights(repository, folder, only, here, weight_map))
    chosen.small = [here[n] for n in dict.fromkeys(_SMALL) if n in here and here[n].size <= _SMALL_MOST]
    first = f"{chosen.weights[0].name}.{RECORD_NAME}"
    chosen.small += [here[first]] if first in here else []
    templates = f"{folder}/additional_chat_templates/".lstrip("/")
    chosen.small += [f for f in repository.files.values() if f.path.startswith(templates) and f.size <= _SMALL_MOST]
    taken = {f.path for f in chosen.files}
    if not any(w.name.endswith((".safetensors", ".gguf")) for w in chosen.weights):
        chosen.small = [f for f in chosen.small if not f.name.endswith("safetensors.index.json")]
    kinds = (".safetensors", ".bin", ".pth", ".gguf")
    left = [f for f in here.values() if f.path not in taken and f.name.endswith(kinds)]
    if left:
        size = human_bytes(sum(f.size for f in left))
        names = ", ".join(f.name for f in left[:4]) + (" …" if len(left) > 4 else "")
        chosen.notes.append(f"not fetched: {names} ({size})")
    return chosen


def _where(repository: Repository, layout: str | None) -> tuple[str, RemoteFile | None]:
    """The folder that is meant, and the file, if one is named."""
    inside = repository.name.inside
    if inside in repository.files:
        return inside.rpartition("/")[0], repository.files[inside]
    if inside and not any(path.startswith(f"{inside}/") for path in repository.files):
        folders = sorted({p.rpartition("/")[0] for p in repository.files if "/" in p})
        raise ConvertError(
            Problem(
                "hub_missing",
                f"{repository.title} has no {inside!r}.",
                file=str(repository.name),
                found=folders[:20],
                hint=f"It has the folders {', '.join(folders[:8])}." if folders else "It has no folders.",
            )
        )
    if layout == "meta" and not inside and any(p.startswith(f"{ORIGINAL}/") for p in repository.files):
        return ORIGINAL, None
    return inside, None


def _in(repository: Repository, folder: str) -> Iterable[RemoteFile]:
    return (f for f in repository.files.values() if f.path.rpartition("/")[0] == folder)


def _at(repository: Repository, folder: str, name: str) -> RemoteFile | None:
    return repository.files.get(f"{folder}/{name}" if folder else name)


def _weights(
    repository: Repository,
    folder: str,
    only: RemoteFile | None,
    here: Mapping[str, RemoteFile],
    weight_map: Mapping[str, str] | None,
) -> list[RemoteFile]:
    candidates = [f for f in here.values() if not f.name.startswith((*NOT_WEIGHTS, "adapter_model", "."))]
    if only is not None and weight_map is None:
        alike = [f for f in candidates if _stem(f.name) == _stem(only.name) and _suffix(f.name) == _suffix(only.name)]
        return sorted(alike, key=lambda f: f.name) if _stem(only.name) != only.name else [only]
    if weight_map:
        return [here[n] for n in sorted(set(weight_map.values())) if n in here] or _none(repository, folder)
    for suffix in (".safetensors", ".bin", ".gguf", ".pth", ".pt"):
        files = [f for f in candidates if f.name.endswith(suffix)]
        sets: dict[str, list[RemoteFile]] = {}
        for file in files:
            sets.setdefault(_stem(file.name), []).append(file)
        usual = next((k for k in _USUAL if k in sets), None)
        if usual is not None:
            return sorted(sets[usual], key=lambda f: f.name)
        if len(sets) > 1:
            raise _several(repository, sets)
        if sets:
            return sorted(next(iter(sets.values())), key=lambda f: f.name)
    return _none(repository, folder)


def _suffix(name: str) -> str:
    return "." + name.rsplit(".", 1)[-1]


def _stem(name: str) -> str:
    """What the shards of one save share; the name itself for a file that stands alone."""
    parts = name.rsplit(".", 1)[0].rsplit("-", 3)
    if len(parts) == 4 and parts[2] == "of" and parts[1].isdecimal() and parts[3].isdecimal():
        return parts[0]
    pieces = name.split(".")
    if pieces[0] == "consolidated" and pieces[-1] in ("pth", "pt"):
        return "consolidated"
    return name


def _several(repository: Repository, sets: Mapping[str, list[RemoteFile]]) -> ConvertError:
    lines = [f"{files[0].path} ({human_bytes(sum(f.size for f in files))})" for files in sets.values()]
    name = repository.name
    at = f"@{name.revision}" if name.revision else ""
    first = next(iter(sets.values()))[0].path
    return ConvertError(
        Problem(
            "two_sets",
            f"{repository.title} holds {len(sets)} sets of weights: {'; '.join(lines[:12])}"
            f"{' …' if len(lines) > 12 else ''}.",
            file=str(name),
            found=[files[0].path for files in sets.values()],
            wanted="one set",
            hint=f"Name one: hf://{name.repo}{at}/{first}.",
        )
    )


def _none(repository: Repository, folder: str) -> list[RemoteFile]:
    adapter = any(f.name.startswith("adapter_") for f in _in(repository, folder))
    elsewhere = sorted(
        {p.rpartition("/")[0] for p in repository.files if p.endswith((".safetensors", ".gguf", ".pth", ".bin"))}
        - {folder}
    )
    where = f" in {folder}" if folder else ""
    what = " but a LoRA adapter" if adapter else ""
    raise ConvertError(
        Problem(
            "hub_missing",
            f"{repository.title} holds no weights{where}{what}.",
            file=str(repository.name),
            found=sorted(f.name for f in _in(repository, folder))[:20],
            hint=f"There are some in {', '.join(elsewhere[:6])}: hf://{repository.name.repo}/{elsewhere[0]}."
            if elsewhere
            else "Safetensors, .bin, .pth and GGUF files were looked for.",
        )
    )
