"""What is wrong with a checkpoint that loads and misbehaves.

First without running it: the order of the rows of Q and K (:mod:`convert.qk_probe`), tensors that are odd by their
numbers (:mod:`convert.oddities`). Then by running the reference model on a text with each known fault undone
(:mod:`convert.hypotheses`), and, where there is a good copy, against that (:mod:`convert.against`). This module brings
the evidence together into a verdict; it changes nothing and prints nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.causes import Cause, weigh
from convert.errors import ConvertError, Problem, UsageError
from convert.oddities import Oddity, odd_tensors
from convert.qk_probe import Probe, probe
from convert.samples import samples

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.findings import Findings

SCHEMA = "convert.diagnose/1"
EXIT_CODES = {"good": 0, "broken": 1, "undecided": 3}
#: Tokens of the text that are used, at most.
TOKENS = 3072
#: Nats that the worst hypothesis must cost, or the model is one that nothing hurts, and the text shows nothing.
POWER = 0.05
#: Bytes of a parameter while the model runs, and room for what it computes.
_FLOAT, _ROOM = 4, 1.25
#: Single-layer hypotheses that ``as_json()`` lists.
_LISTED = 24


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        verdict: ``good``, ``broken`` or ``undecided``.
        message: The verdict in a sentence.
        causes: What is wrong, likeliest first.
        probe: What the rows of Q and K say.
        tensors: Odd tensors.
        findings: What the runs say, or None where the model was not run.
        against: What the comparison with a good copy says, or None.
        hints: What else is worth knowing.
        absent: Why a part is missing, by part.
        sides: The checkpoint (and the good copy) in words.
    """

    verdict: str
    message: str
    causes: tuple[Cause, ...]
    probe: Probe | None
    tensors: tuple[Oddity, ...]
    findings: Findings | None = None
    against: Any = None
    hints: tuple[str, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)
    sides: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 for good, 1 for broken, 3 for undecided."""
        return EXIT_CODES[self.verdict]

    def as_json(self) -> dict[str, Any]:
        """The result as ``diagnose --json`` documents it (schema ``convert.diagnose/1``)."""
        value = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "message": self.message,
            "causes": [cause.as_json() for cause in self.causes],
            "probe": self.probe.as_json() if self.probe else None,
            "hypotheses": [t.as_json() for t in self.findings.listed(_LISTED)] if self.findings else [],
            "tensors": [oddity.as_json() for oddity in self.tensors],
            "hints": list(self.hints),
        }
        if self.against is not None:
            value["against"] = self.against.as_json()
        return value

    def detail(self) -> dict[str, Any]:
        """Plain data for the page (:mod:`convert.html.diagnose` says which)."""
        out: dict[str, Any] = {"sides": self.sides, "absent": dict(self.absent)}
        if self.findings:
            found = self.findings
            out["baseline"] = {
                "loss": found.baseline,
                "low": found.low,
                "high": found.high,
                "tokens": found.tokens,
            }
            out["hypotheses"] = [t.as_json() for t in found.trials]
            out["margin"] = found.margin
            worst = found.control()
            if worst is not None:
                out["control"] = {"name": worst.name, "loss": worst.loss, "tokens": worst.tokens}
        if self.against is not None:
            out["against"] = self.against.detail()
        return out


def diagnose(
    src: str | Path | Checkpoint,
    *,
    against: str | Path | Checkpoint | None = None,
    probe_only: bool = False,
    text: str | None = None,
    tokens: Sequence[int] | None = None,
    tokenizer: str | Path | None = None,
    device: str = "auto",
    threads: int = 2,
    on_step: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Diagnosis:
    """Find what is wrong with a checkpoint.

    Args:
        src: A path, or an opened checkpoint.
        against: A good copy of the same model, of any layout.
        probe_only: Look at the numbers only; run nothing, import no torch.
        text: What to run on, in place of the text that is shipped; the longer the better.
        tokens: Token ids to run on, where there is no tokenizer.
        tokenizer: Where the tokenizer is, if not beside ``src``.
        device: ``auto``, ``cuda``, ``mps``, ``cpu``.
        threads: Blocks read at once.
        on_step: Told what is being done, how many steps are done, and of how many.
        **options: What can be said of ``src`` (:class:`convert.checkpoint.Options`); ``follow_links`` also of
            ``against``.

    Raises:
        UsageError: The request makes no sense.
        ConvertError: The checkpoint cannot be opened, or does not fit its table (``validate`` lists all of it).
    """
    if text is not None and tokens is not None:
        raise UsageError(Problem("tokens", "Give token ids or text, not both."))
    tell = on_step or (lambda *_: None)
    with ExitStack() as stack:
        ckpt = _opened(stack, src, options)
        ckpt.require_sound()
        good = None
        if against is not None:
            good = _opened(stack, against, {"follow_links": options.get("follow_links", False)})
            _same_model(ckpt, good)
        tell("samples of the tensors", 0, 0)
        looked = samples(ckpt, threads=threads)
        tell("the order of the rows of Q and K", 0, 0)
        known = {s.key: s.profiles[0] for s in looked if s.profiles and s.expert is None}
        probed = probe(ckpt, threads=threads, known=known) if ckpt.table.has_rope else None
        tell("odd tensors", 0, 0)
        odd = odd_tensors(ckpt, threads=threads, looked=looked)
        absent: dict[str, str] = {}
        found = None
        ids = None if probe_only else _ids(ckpt, text, tokens, tokenizer, absent)
        sides = {"a": _side(ckpt)}
        compared = None
        if good is not None:
            tell("against the good copy", 0, 0)
            compared = _against(ckpt, good, ids, device, not probe_only, threads, tell)
            sides["b"] = _side(good)
        if probe_only:
            absent["hypotheses"] = "only the numbers were looked at (--probe-only)"
        elif compared is not None and (compared.explained or not compared.differs):
            absent["hypotheses"] = "the good copy decides: no text had to be predicted"
        elif any(oddity.kind in ("nan", "inf") for oddity in odd):
            absent["hypotheses"] = "tensors hold NaN or Inf, and so does all that is computed from them"
        elif ids is not None:
            found = _run(ckpt, ids, probed, odd, device, absent, tell)
        judged = weigh(ckpt, probed, odd, found, compared)
        verdict, message, hints = _judge(judged, probed, found, absent, power=POWER, compared=compared)
        return Diagnosis(
            verdict=verdict,
            message=message,
            causes=tuple(judged.causes),
            probe=probed,
            tensors=tuple(odd),
            findings=found,
            against=compared,
            hints=(*judged.hints, *hints),
            absent=absent,
            sides=sides,
        )


def _opened(stack: ExitStack, src: Any, options: dict[str, Any]) -> Checkpoint:
    if not isinstance(src, (str, Path)):
        opened: Checkpoint = src
        return opened
    from convert.checkpoint import open_checkpoint

    return stack.enter_context(open_checkpoint(src, **options))


def _same_model(ckpt: Checkpoint, good: Checkpoint) -> None:
    """Refuse a good copy of another model: its numbers would be taken for the right ones of this.

    Layers and the sizes of what is in them decide; a vocabulary may be padded, and layouts turn matrices.
    """
    sizes = [
        {key: _count(source.shape) for key, source in side.match.logical.items() if key[1] is not None}
        for side in (ckpt, good)
    ]
    layers = [1 + max((layer for _, layer in side if layer is not None), default=-1) for side in sizes]
    other = [key for key in sizes[0] if key in sizes[1] and sizes[0][key] != sizes[1][key]]
    if ckpt.family != good.family:
        message = f"it is of the family {good.family}, and {ckpt.path} of {ckpt.family}."
    elif layers[0] != layers[1]:
        message = f"it has {layers[1]} layers, and {ckpt.path} has {layers[0]}."
    elif other:
        message = f"{len(other)} of {len(sizes[0])} tensors of its layers have other sizes."
    else:
        return
    raise UsageError(
        Problem(
            "other_model",
            f"{good.path} is no copy of the same model: {message}",
            file=str(good.path),
            hint=f"Give a good copy of the same model, or none: convert diagnose {shlex.quote(str(ckpt.path))}",
        )
    )


def _side(ckpt: Checkpoint) -> dict[str, Any]:
    return {"path": str(ckpt.path), "format": ckpt.format, "layout": ckpt.layout, "family": ckpt.family}


def _ids(
    ckpt: Checkpoint,
    text: str | None,
    tokens: Sequence[int] | None,
    tokenizer: str | Path | None,
    absent: dict[str, str],
) -> list[int] | None:
    """Token ids to run on; None, with the reason, where there is no tokenizer and nothing was asked for."""
    size = int(ckpt.config["vocab_size"])
    if tokens is not None:
        ids = [int(t) for t in tokens]
    else:
        from convert.text_tokenizer import text_tokenizer
        from convert.texts import shipped

        try:
            ids = text_tokenizer(ckpt, tokenizer).encode(shipped() if text is None else text)
        except ConvertError as error:
            if text is not None or tokenizer is not None:
                raise
            absent["hypotheses"] = (
                f"{error.problems[0].message} Give one (--tokenizer PATH) or token ids (--tokens FILE); without, only "
                "the numbers were looked at."
            )
            return None
    wrong = [t for t in ids if not 0 <= t < size]
    if wrong or len(ids) < 32:
        message = (
            f"Token ids {wrong[:5]} are outside the vocabulary of {size}."
            if wrong
            else f"{len(ids)} tokens are too few to tell anything; give 300, better 3,000."
        )
        raise UsageError(Problem("tokens", message, found=wrong[:5] or len(ids)))
    return ids[:TOKENS]


def _run(
    ckpt: Checkpoint,
    ids: Sequence[int],
    probed: Probe | None,
    odd: Sequence[Oddity],
    device: str,
    absent: dict[str, str],
    tell: Callable[[str, int, int], None],
) -> Findings | None:
    """Run the hypotheses, if the model fits into memory."""
    from convert.causes import suspects
    from convert.devices import pick_device
    from convert.platform import available_memory

    target = pick_device(device)
    if ckpt.table.reference is None:
        absent["hypotheses"] = "the family's table names no reference model"
        return None
    needed = int(_ROOM * _FLOAT * sum(_count(source.shape) for source in ckpt.match.logical.values()))
    free = available_memory() if target.type == "cpu" else None
    if target.type == "cuda":
        import torch

        free = torch.cuda.mem_get_info(target)[0]
    if free is not None and needed > free:
        absent["hypotheses"] = (
            f"running the model takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; only the numbers were "
            "looked at"
        )
        return None
    from convert.hypotheses import test_all
    from convert.trials import Bench

    tell("reading the model", 0, 0)
    return test_all(Bench(ckpt, device=target), ids, first=suspects(ckpt, probed, odd), on_step=tell)


def _count(shape: Sequence[int]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


def _against(
    ckpt: Checkpoint, good: Checkpoint, ids: Sequence[int] | None, device: str, run: bool, threads: int, tell: Any
) -> Any:
    from convert.against import compare_against

    return compare_against(ckpt, good, ids=ids, device=device, threads=threads, run=run, on_step=tell)


def _judge(
    judged: Any,
    probed: Probe | None,
    found: Findings | None,
    absent: dict[str, str],
    *,
    power: float,
    compared: Any = None,
) -> tuple[str, str, list[str]]:
    """Verdict, message, hints."""
    causes: list[Cause] = judged.causes
    if causes:
        first = causes[0]
        also = [c for c in causes[1:] if c.confidence >= 0.5]
        message = first.words[0].upper() + first.words[1:]
        if first.loss is not None and found is not None and found.cause is not None:
            message += f": the loss falls from {found.cause.baseline:.2f} to {first.loss:.2f} with it undone"
        message += "." if not also else f"; {', and '.join(c.words for c in also)}."
        return ("broken" if first.confidence >= 0.5 else "undecided"), message, []
    if judged.differs:
        return "broken", "It is another model than the good copy, and no known fault explains how.", []
    if compared is not None:
        return "good", compared.message(), []
    if found is None:
        why = absent.get("hypotheses", "the model was not run").rstrip(".")
        if probed is not None and probed.agrees:
            seen = f"Nothing is odd about the numbers, and the rows of Q and K are in {probed.order} order, as told."
            return "good", seen, [f"The model was not run: {why}."]
        return "undecided", "The numbers do not tell, and the model was not run.", [f"The model was not run: {why}."]
    loss = f"{found.baseline:.2f} nats per token on {found.tokens:,} tokens"
    level = f"{found.level:.2f} is what the frequencies of the tokens alone give"
    if not found.sensible:
        return (
            "undecided",
            f"The model makes no sense of the text ({loss}; {level}), and no known fault explains it.",
            ["Untrained weights, a fault that is not known here, or a text in no language of the model (--text FILE)."],
        )
    if found.power < power:
        return "undecided", f"No fault changes what the model predicts ({loss}): it cannot be judged by this text.", []
    return "good", f"The model predicts the text ({loss}; {level}), and no known fault undone makes it better.", []
