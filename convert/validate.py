"""Is a checkpoint whole and sound? Every tensor once, right shapes, whole files; with a scan, every value.

Opening and matching find most (:mod:`convert.checkpoint`, :mod:`convert.match`); this module collects their findings
instead of raising them, adds what only a second look finds, and says what to do. It converts and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.checkpoint import Checkpoint, open_checkpoint
from convert.dtypes import dtype
from convert.errors import ConvertError, Problem, UsageError
from convert.hub.place import Place, place
from convert.locate import SUFFIXES
from convert.report import fold_names, fold_problems
from convert.zero_tails import zero_tails

if TYPE_CHECKING:
    import torch

    from convert.checksums import Hashed

SCHEMA = "convert.validate/1"
#: Folded findings that a terminal shows; the rest is in the JSON.
_SHOWN = 16


@dataclass(slots=True)
class Validation:
    """The outcome of :func:`validate`.

    Attributes:
        path: What was looked at.
        problems: Every finding, layers not folded.
        notes: What is odd but no fault: warnings and assumptions.
        checked: What was checked, in words.
        tensors: How many tensors there are; None where the checkpoint could not be opened.
        hashes: Of its files, where they were asked for.
        origin: Of a repository on the Hub: ``repo``, ``commit``, ``files`` (bytes, SHA-256 as the Hub has them).
    """

    path: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: str = ""
    tensors: int | None = None
    hashes: list[Hashed] | None = None
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing was found; notes do not count."""
        return not self.problems

    @property
    def exit_code(self) -> int:
        """What the command line returns."""
        return 0 if self.ok else 1

    def as_json(self) -> dict[str, Any]:
        """The object that ``validate --json`` prints; its keys are documented and stable."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "problems": [p.as_json() for p in self.problems],
            "notes": self.notes,
            **({} if self.hashes is None else {"hashes": [h.as_json() for h in self.hashes]}),
            **({"hub": self.origin} if self.origin else {}),
        }

    def lines(self) -> list[str]:
        """The verdict first, then the findings with layers folded, then what to do."""
        notes = [*self._hash_lines(), *(f"  note: {n}" for n in self.notes)]
        if self.ok:
            return [f"ok: {self.path}: {self.checked}", *notes]
        folded = fold_problems(self.problems)
        many = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        kinds = f" of {len(folded)} kinds" if 1 < len(folded) < len(self.problems) else ""
        out = [f"NOT ok: {self.path}: {many}{kinds}"]
        out += [f"  {p.kind}: {p.message}" for p in folded[:_SHOWN]]
        if len(folded) > _SHOWN:
            out.append(f"  … and {len(folded) - _SHOWN} more; --json has them all")
        hints = list(dict.fromkeys(p.hint for p in folded[:_SHOWN] if p.hint))
        return [*out, *notes, "What to do:", *(f"  {h}" for h in hints or ["Fetch or save the checkpoint again."])]

    def _hash_lines(self) -> list[str]:
        found = self.hashes or []
        plain = [f"  {h.algorithm} {h.digest}  {h.path.name}" for h in found if h.ok is None]
        good: dict[str, list[str]] = {}
        for h in found:
            if h.ok:
                good.setdefault(f"{h.algorithm} as {h.origin} says", []).append(h.path.name)
        same = [f"  {what.replace(', says', ' says')}: {', '.join(names)}" for what, names in good.items()]
        nothing = "  nobody's hashes lie beside these files: the hashes above were compared with nothing"
        return same + plain + ([nothing] if plain and not same else [])


def validate(
    src: str | Path | Checkpoint,
    *,
    model: torch.nn.Module | None = None,
    scan: bool = False,
    hashes: bool = False,
    checksums: str | Path | None = None,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Validation:
    """Check a checkpoint; what is wrong with it is returned, not raised.

    Args:
        src: A folder, a file, or an opened checkpoint.
        model: Also: would it load into this module?
        scan: Also read every value, for NaN, infinities and tensors of zeros; look for what else is odd
            (:mod:`convert.oddities`); read all of Q and K for the order of their rows (else at most 32 MB).
            Like the two below, it also compares the CRCs in torch files.
        hashes: Also hash the files, and compare with the hashes that lie about: names of blobs in a Hugging Face cache,
            Meta's ``checklist.chk``, the record of a conversion.
        checksums: A list of hashes to compare with instead, as ``sha256sum`` or ``md5sum`` write it.
        threads: Workers of the scan.
        progress: Called with the bytes that the scan has read since the last call, from any thread.
        **options: As :func:`convert.open_checkpoint`; with ``model``, ``names`` are the module's (and the source's,
            where it has the same).

    Raises:
        UsageError: There is nothing at ``src``, or an option does not exist.
    """
    if isinstance(src, Checkpoint):
        out = _validate(src, model, options.get("names"), scan, threads, progress)
        if scan or hashes or checksums is not None:
            _crcs(src, out, threads, progress)
        if hashes or checksums is not None:
            _hash(out, src.files, checksums, src.record, threads, progress)
        return out
    names = options.pop("names", None) if model is not None else None
    values = scan or hashes or checksums is not None or model is not None
    at = place(src, layout=options.get("layout"), way="download" if values else "glance")
    try:
        checkpoint = _open(at, names, options)
    except UsageError:
        raise
    except ConvertError as error:
        out = Validation(Path(str(at.name)) if at.name else at.path, list(error.problems), checked="not opened")
        linked = any(p.kind == "link" for p in error.problems)  # such files are not read
        if not linked and (hashes or checksums is not None):  # a damaged file, perhaps: which one is it?
            _hash(out, _files(at.path), checksums, {}, threads, progress)
        return out
    with checkpoint:
        checkpoint.only_samples = not scan
        out = _validate(checkpoint, model, names, scan, threads, progress)
        if scan or hashes or checksums is not None:
            _crcs(checkpoint, out, threads, progress)
        if hashes or checksums is not None:
            _hash(out, checkpoint.files, checksums, checkpoint.record, threads, progress)
        return out


def _open(src: Place, names: str | Path | None, options: dict[str, Any]) -> Checkpoint:
    """Open a source that may or may not have the module's own names."""
    try:
        return open_checkpoint(src, **options)
    except ConvertError as error:
        if names is None or error.problems[0].kind != "unknown_names":
            raise
    return open_checkpoint(src, names=names, **options)


def _validate(
    checkpoint: Checkpoint,
    model: torch.nn.Module | None,
    names: str | Path | None,
    scan: bool,
    threads: int,
    progress: Callable[[int], None] | None,
) -> Validation:
    out = Validation(Path(checkpoint.title), notes=list(checkpoint.notes), tensors=len(checkpoint.tensors))
    out.origin = {**checkpoint.origin, "files": checkpoint.remote_files} if checkpoint.origin else {}
    what = f"{checkpoint.family}, {checkpoint.layout} layout, {checkpoint.format}"
    out.checked = f"{what}; {len(checkpoint.tensors)} tensors, each once, with the shapes that the config wants"
    out.problems += zero_tails(checkpoint)
    try:
        matched = checkpoint.match
    except ConvertError as error:
        out.problems += [*checkpoint.problems, *error.problems]
        return out
    out.problems += matched.problems
    out.notes += matched.notes
    _tokenizer(checkpoint, out, scan)
    out.notes += [f"{len(matched.ignored)} tensors are no weights and are not used"] if matched.ignored else []
    out.notes += _stated_dtype(checkpoint)
    if not matched.problems:
        out.notes += _stated_tie(checkpoint)
    if scan:
        _scan(checkpoint, out, threads, progress)
    _row_order(checkpoint, out, scan, threads)
    if model is not None:
        from convert.modules import check_module

        out.problems += check_module(checkpoint, model, names=names)
        out.checked += "; it loads into the module"
    return out


def _tokenizer(checkpoint: Checkpoint, out: Validation, scan: bool) -> None:
    """The tokenizer inside or beside it: whether its files can be used, and its ids have rows."""
    from convert.tokenizer import audit

    rows = int(checkpoint.config["vocab_size"])
    if checkpoint.layout == "gguf":
        found = audit.audit_gguf(checkpoint.metadata, rows=rows, full=scan)
    else:
        config = checkpoint.raw_config if checkpoint.layout == "hf" else {}
        found = audit.audit(checkpoint.folder, rows=rows, config=config, full=scan)
    out.problems += found.problems
    out.notes += found.notes
    out.checked += f"; {found.checked}" if found.checked else ""


def _scan(checkpoint: Checkpoint, out: Validation, threads: int, progress: Callable[[int], None] | None) -> None:
    from convert.oddities import odd_tensors
    from convert.scan import scan_checkpoint

    problems, zeros = scan_checkpoint(checkpoint, threads=threads, progress=progress)
    out.problems += problems
    out.notes += [f"all zeros: {', '.join(fold_names(zeros))}"] if zeros else []
    out.checked += "; every value read: no NaN, no infinity, no tensor of zeros"
    said = {p.tensor for p in problems}
    for oddity in odd_tensors(checkpoint, threads=threads, scanned=True):
        if oddity.fault and oddity.tensor not in said:
            out.problems.append(oddity)
        elif not oddity.fault:
            out.notes.append(oddity.message)


def _row_order(checkpoint: Checkpoint, out: Validation, scan: bool, threads: int) -> None:
    """Whether the numbers say that the rows of Q and K are in another order than the layout's."""
    if not checkpoint.table.has_rope or not checkpoint.pool.local:
        return
    from convert.qk_probe import SAMPLE_BYTES, probe

    found = probe(checkpoint, max_bytes=None if scan else SAMPLE_BYTES, threads=threads)
    problem = found.problem(checkpoint)
    out.problems += [problem] if problem else []
    if problem is None and found.order not in (None, found.expected):
        out.notes.append(f"{found.words()}, where {found.expected} order is expected; not sure enough to be a problem")
    out.checked += f"; Q and K in {found.order} order, as their numbers too say" if found.agrees else ""


def _crcs(checkpoint: Checkpoint, out: Validation, threads: int, progress: Callable[[int], None] | None) -> None:
    """Whether the storages of torch files have the CRCs that their archives state."""
    from convert.storage_crcs import compare_crcs

    compared, problems = compare_crcs(checkpoint, threads=threads, progress=progress)
    out.problems += problems
    out.checked += f"; the CRC-32 of {compared} storages compared" if compared else ""


def _hash(
    out: Validation,
    files: Sequence[Path],
    checksums: str | Path | None,
    record: Mapping[str, Any],
    threads: int,
    progress: Callable[[int], None] | None,
) -> None:
    """Full hashes of the files, against whatever says what they should be."""
    from convert.checksums import verify_hashes

    out.hashes, problems = verify_hashes(files, checksums=checksums, record=record, threads=threads, progress=progress)
    out.problems += problems
    compared = sum(h.ok is not None for h in out.hashes)
    out.checked += f"; {compared} of {len(out.hashes)} files hash to what was published" if compared else ""


def _files(path: Path) -> list[Path]:
    """The weight files of a checkpoint that cannot be opened, as far as names tell."""
    if path.is_file():
        return [path]
    return sorted(p for p in path.iterdir() if p.is_file() and p.suffix in SUFFIXES and not p.name.startswith("."))


def _stated_dtype(checkpoint: Checkpoint) -> list[str]:
    stated = checkpoint.raw_config.get("dtype") or checkpoint.raw_config.get("torch_dtype")
    try:
        same = not isinstance(stated, str) or dtype(stated).name == checkpoint.dtype
    except KeyError:
        same = False
    return [] if same else [f"the config says dtype {stated}, most bytes are {checkpoint.dtype}; the tensors count"]


def _stated_tie(checkpoint: Checkpoint) -> list[str]:
    stated = checkpoint.config.get("tie_word_embeddings")
    if checkpoint.layout != "hf" or not stated or checkpoint.match.tied(sampled=True):
        return []
    return [
        "the config says tie_word_embeddings = true, but head and embedding differ: conversions here keep both, "
        "transformers would replace the head by the embedding; set the flag to false"
    ]
