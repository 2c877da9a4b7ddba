"""What is known about an opened checkpoint, in words and as JSON. Found by :mod:`convert.inspect`; reads nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.decisions import lines as decision_lines
from convert.dtypes import DTYPES, TORCH_NAMES
from convert.report import human_bytes

SCHEMA = "convert.inspect/1"
#: Bytes of one cached number where the weights' own type is none that a cache could have.
_CACHE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as it lies on disk; its parts where several files hold one each.

    Attributes:
        name: The name in the file.
        dtype: Canonical type name.
        shape: Full shape, torch order.
        nbytes: Bytes of all parts.
        files: The files that hold them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    files: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The keys of one item of ``tensors``."""
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "bytes": self.nbytes,
            "file": self.files[0] if len(self.files) == 1 else list(self.files),
        }


def _rope_line(rope: dict[str, Any]) -> str:
    more = ", ".join(f"{k} {v:g}" for k, v in rope.items() if k not in ("rope_type", "rope_theta"))
    scaling = "no scaling" if rope["rope_type"] == "default" else f"{rope['rope_type']} scaling"
    return f"theta {rope['rope_theta']:,.10g}, {scaling}" + (f" ({more})" if more else "")


@dataclass(slots=True)
class Inspection:
    """What :func:`convert.inspect.inspect` found.

    Attributes:
        path: What was opened.
        format: Container format.
        layout: Naming and numeric scheme.
        family: Family of the model.
        size: Published size that it equals, or None.
        dtypes: Bytes per canonical type, most bytes first.
        pairing: Order of the rotary rows of Q and K, and how that is known.
        components: Parameters as stored, by component.
        parameters: Distinct parameters: a tied head counts once.
        parameters_stored: Parameters of all stored tensors; buffers do not count.
        tied: Whether head and embedding are one; None where that is unknown.
        tied_evidence: How that is known.
        rope: RoPE settings, ``rope_type`` and ``rope_theta`` among them.
        numbers: The model's sizes (``n_layers``, ``n_heads``, ``n_kv_heads``, ``head_dim``, ``vocab_size``, ``width``,
            ``ff_width``, ``context``); None where the config does not tell. ``kv_layers`` where not all layers have
            keys of their own.
        tensors: Every stored tensor.
        files: Weight files with their bytes.
        problems: How many findings ``validate`` would list.
        notes: Assumptions, stripped prefixes, dropped tensors.
        record: What the conversion that wrote it left: ``tool``, ``source`` (``layout``, ``format``, ``files``,
            ``bytes``), ``dtype``, ``decisions`` (:mod:`convert.decisions`) and ``hashes`` (``full``, ``headers`` or
            None); None for a checkpoint from elsewhere.
        title: What the user called it.
        origin: Of a repository on the Hub: ``repo``, ``commit``, ``files`` (bytes, SHA-256 as the Hub has them).
    """

    path: Path
    format: str
    layout: str
    family: str
    size: str | None
    dtypes: dict[str, int]
    pairing: str
    components: dict[str, int]
    parameters: int
    parameters_stored: int
    tied: bool | None
    tied_evidence: str
    rope: dict[str, Any]
    numbers: dict[str, Any]
    tensors: list[Stored]
    files: list[tuple[str, int]]
    problems: int = 0
    notes: list[str] = field(default_factory=list)
    record: dict[str, Any] | None = None
    title: str = ""
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The type that most bytes have, as people write it (``bfloat16``, ``Q8_0``)."""
        return dtype_name(next(iter(self.dtypes), "F32"))

    def kv_bytes(self, *, item: int = 2, heads: str = "n_kv_heads") -> int | None:
        """Bytes that the key/value cache grows by with each token.

        Args:
            item: Bytes per cached number.
            heads: Which head count to use; ``n_heads`` tells what plain multi-head attention would take.
        """
        parts = [self._kv_layers(), *(self.numbers.get(k) for k in (heads, "head_dim"))]
        return None if None in parts else 2 * math.prod(int(p or 0) for p in parts) * item

    def _kv_layers(self) -> int | None:
        return self.numbers.get("kv_layers", self.numbers.get("n_layers"))

    def as_json(self) -> dict[str, Any]:
        """The object that ``inspect --json`` prints; its keys are documented and stable."""
        return {
            "schema": SCHEMA,
            "format": self.format,
            "layout": self.layout,
            "family": self.family,
            "dtype": self.dtype,
            "parameters": self.parameters,
            "parameters_stored": self.parameters_stored,
            "tied": self.tied,
            "rope": self.rope,
            **{k: self.numbers.get(k) for k in ("n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size")},
            "tensors": [t.as_json() for t in self.tensors],
            "notes": self.notes,
            "record": self.record,
            **({"hub": self.origin} if self.origin else {}),
        }

    def lines(self) -> list[tuple[str, str]]:
        """What a terminal or a notebook shows: pairs of a word and what there is to say."""
        size = sum(n for _, n in self.files)
        names = ", ".join(n for n, _ in self.files[:3]) + (" …" if len(self.files) > 3 else "")
        files = f"{human_bytes(size)} in {_count(len(self.files), 'file')} ({names})"
        out = [
            ("layout", f"{self.layout} ({self.format})"),
            ("family", self.family + (f", {self.size}" if self.size else "")),
            ("on disk", f"{files}, {_count(len(self.tensors), 'tensor')}"),
            ("types", self._types()),
            ("parameters", self._parameters()),
            ("", ", ".join(f"{name} {count:,}" for name, count in self.components.items())),
            ("tied head", {True: "yes", False: "no", None: "unknown"}[self.tied] + f" ({self.tied_evidence})"),
            ("sizes", self._sizes()),
            ("RoPE", self._rope()),
            ("Q, K rows", self.pairing),
            ("heads", self._heads()),
            ("KV cache", self._cache()),
        ]
        if self.problems:
            out.append(("problems", f"{_count(self.problems, 'finding')}; `convert validate` lists them"))
        return [*out, *self._record(), *(("note", note) for note in self.notes)]

    def _record(self) -> list[tuple[str, str]]:
        """Who wrote it, from what, and what was decided then."""
        if self.record is None:
            return []
        source = self.record["source"]
        made = f"{self.record['tool']}"
        if source["layout"]:
            size = f", {_count(source['files'], 'file')}, {human_bytes(source['bytes'])}" if source["files"] else ""
            made += f" from the {source['layout']} layout ({source['format']}{size})"
        asked = f", dtype {self.record['dtype']}" if self.record["dtype"] else ""
        kept = {"full": "with full hashes", "headers": "with the headers' hashes"}.get(str(self.record["hashes"]))
        kept = f"; its record, {kept}, is beside: `convert check`" if kept else ""
        decided = decision_lines(self.record["decisions"])
        return [("written by", made + asked + kept), *(("decided then", line) for line in decided)]

    def _types(self) -> str:
        total = sum(self.dtypes.values()) or 1
        shares = {dtype_name(k): 100 * n / total for k, n in self.dtypes.items()}
        return ", ".join(k if len(shares) == 1 else f"{k} {share:.3g} %" for k, share in shares.items())

    def _parameters(self) -> str:
        if self.parameters == self.parameters_stored:
            return f"{self.parameters:,}"
        return f"{self.parameters:,} distinct, {self.parameters_stored:,} stored"

    def _sizes(self) -> str:
        words = {"n_layers": "layers", "width": "wide", "ff_width": "in the MLP", "vocab_size": "vocabulary rows"}
        said = [f"{self.numbers[k]:,} {w}" for k, w in words.items() if self.numbers.get(k) is not None]
        context = self.numbers.get("context")
        return ", ".join([*said, f"context {context:,}" if context else "context not stated"])

    def _rope(self) -> str:
        if not self.rope:
            return "none: nothing turns in this family"
        if "rope_type" in self.rope:
            return _rope_line(self.rope)
        return "; ".join(f"{kind.removesuffix('_attention')} {_rope_line(v)}" for kind, v in self.rope.items())

    def _heads(self) -> str:
        heads, kv, width = (self.numbers.get(k) for k in ("n_heads", "n_kv_heads", "head_dim"))
        if heads is None or kv is None:
            return "not stated"
        text = f"{heads} of {width}, {kv} for keys and values"
        if not kv or heads == kv:
            return f"{text} (plain multi-head attention)"
        saved = 2 * (heads - kv) * (width or 0) * (self.numbers.get("width") or 0) * (self._kv_layers() or 0)
        smaller = f"makes the cache {heads / kv:g} times smaller"
        return f"{text}: grouped-query attention saves {saved:,} parameters and {smaller}"

    def _cache(self) -> str:
        now, plain = self.kv_bytes(), self.kv_bytes(heads="n_heads")
        if now is None or plain is None:
            return "unknown"
        text = f"{now:,} bytes per token in 16 bit"
        own = _cache_item(next(iter(self.dtypes), "F32"))
        if own != _CACHE_BYTES:
            text += f", {self.kv_bytes(item=own):,} in {self.dtype}"
        if plain != now:
            text += f" ({plain:,} without grouped queries)"
        context = self.numbers.get("context")
        return text + (f"; {human_bytes(now * context)} for {context:,} tokens" if context else "")


def dtype_name(canonical: str) -> str:
    """The name that people type: ``bfloat16`` for ``BF16``; other types keep theirs."""
    return TORCH_NAMES.get(canonical, canonical)


def _cache_item(canonical: str) -> int:
    """Bytes of a cached number in the checkpoint's type; 16 bit where that is block-quantised."""
    kind = DTYPES[canonical]
    return kind.block_bytes if kind.is_float else _CACHE_BYTES


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
