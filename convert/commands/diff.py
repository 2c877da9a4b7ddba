"""``convert diff A B``: compare two checkpoints tensor by tensor, with their configs and tokenizers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import click

from convert.commands.options import output_options, report_option, report_writer
from convert.commands.sides import side, side_options, tolerance_options

if TYPE_CHECKING:
    from convert.diff import Diff
    from convert.differences import Difference
    from convert.tensor_delta import TensorDelta

#: Lines of tensors, and of config and tokenizer each, that fit one screen.
_TENSORS, _LINES = 14, 6
#: Tensors that a side lacks in a layer and that are told one by one.
_FEW = 2


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@tolerance_options
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Workers.")
@side_options
@report_option
@output_options
def command(a: str, b: str, as_json: bool, quiet: bool, debug: bool, **options: Any) -> int:
    """Compare two checkpoints of any layouts and formats, without running them.

    Tensors are brought into one layout and compared bit for bit (rotary rows that two layouts keep in different orders
    are no difference), configs in one spelling, tokenizers by what they hold. Exit code 0: the same, 1: different.
    """
    write_report = report_writer(options["report"], quiet=quiet)
    result = run(a, b, options, show_progress=not (quiet or as_json))
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2, ensure_ascii=False))
    elif not quiet:
        from convert.terminal import show_lines

        show_lines(lines(result))
    write_report(result)
    return result.exit_code


def verify_tensors(
    a: str, b: str | None, options: dict[str, Any], write_report: Callable[..., None], *, as_json: bool, quiet: bool
) -> int:
    """``convert verify A B --tensors``: the same comparison with the verdict pass or fail; returns the exit code."""
    if b is None:
        raise click.UsageError("Missing argument 'B'.")
    for key in ("text", "prompts", "layerwise"):
        if options[key] is not None:
            raise click.UsageError(f"--{key} is for running the models, and --tensors runs nothing.")
    if options["engine"] != "reference":
        raise click.UsageError("--engine is for running the models, and --tensors runs nothing.")
    result = run(a, b, options | {"threads": 2}, show_progress=not (quiet or as_json), tensors_only=True)
    verdict = "fail" if result.exit_code or not result.deltas else "pass"
    if as_json:
        value = result.as_json() | {"schema": "convert.verify-tensors/1", "verdict": verdict}
        for key in ("config", "tokenizer", "record"):
            del value[key]
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))
    elif not quiet:
        from convert.terminal import show_lines

        _, *rest = lines(result)
        show_lines([f"verify --tensors: {verdict}", *rest])
    write_report(result)
    return 0 if verdict == "pass" else 1


def run(a: str, b: str, options: dict[str, Any], *, show_progress: bool, tensors_only: bool = False) -> Diff:
    """Open both sides as the options say, and compare them.

    Raises:
        ConvertError: As :func:`convert.diff.diff`.
    """
    from convert.checkpoint import open_checkpoint
    from convert.diff import diff

    chosen = {key: options[key] for key in ("atol", "rtol", "only", "threads")}
    with open_checkpoint(a, **side(a, options, "")) as first, open_checkpoint(b, **side(b, options, "_b")) as second:
        total = sum(spec.nbytes for c in (first, second) for specs in c.tensors.values() for spec in specs)
        progress = _progress(total) if show_progress else None
        return diff(first, second, tensors_only=tensors_only, progress=progress, **chosen)


def _progress(total: int) -> Callable[[int], None] | None:
    """A line on a terminal's stderr that counts, nothing elsewhere."""
    stream = sys.stderr
    if not stream.isatty() or not total:
        return None
    done, shown = 0, -1

    def tell(count: int) -> None:
        nonlocal done, shown
        done += count
        share = min(100, done * 100 // total)
        if share != shown:
            shown = share
            stream.write(f"\r… comparing {share:3} %" if share < 100 else "\r                  \r")
            stream.flush()

    return tell


def lines(result: Diff) -> Iterator[str]:
    """The result in one screen: verdict, what both sides are, the worst tensors first, layers folded."""
    from convert.report import human_bytes

    yield f"diff: {result.verdict}"
    yield f"  {result.message}"
    for name, about in zip("AB", result.sides, strict=True):
        types = ", ".join(f"{kind} × {count}" for kind, count in list(about["dtypes"].items())[:4])
        yield f"  {name}  {about['path']}: {about['family']}, {about['layout']} layout, {about['format']}, {types}"
    if result.seconds and result.bytes_read:
        rate = human_bytes(result.bytes_read / result.seconds)
        counts = ", ".join(f"{count} {relation}" for relation, count in result.counts.items())
        yield f"  tensors: {counts}  ({human_bytes(result.bytes_read)} read, {rate}/s)"
    yield from _table(fold(result.worst))
    for name, found in (("config", result.config), ("tokenizer", result.tokenizer), ("record", result.record)):
        yield from _said(name, found or ())
    for hint in result.hints:
        yield f"  {hint}"


def _said(name: str, found: Sequence[Difference]) -> Iterator[str]:
    if not found:
        return
    weighing = [d for d in found if d.weighs]
    idle = len(found) - len(weighing)
    if name == "record":
        yield f"  record: {idle} entries differ ({', '.join(d.key for d in found[:4])}{' …' if idle > 4 else ''})"
        return
    yield f"  {name}:"
    for difference in weighing[:_LINES]:
        yield f"    {difference.line()}"
    if len(weighing) > _LINES:
        yield f"    … and {len(weighing) - _LINES} more"
    if idle:
        keys = [d.key for d in found if not d.weighs]
        yield f"    that do not weigh: {', '.join(keys[:_LINES])}{' …' if idle > _LINES else ''}"


def fold(deltas: Sequence[TensorDelta]) -> list[tuple[str, list[TensorDelta]]]:
    """Deltas that say the same of several layers, under one folded name; the worst group first, as they come."""
    from convert.report import fold_names

    alone: dict[tuple[str, str], list[TensorDelta]] = {}  # what one side lacks in a layer
    for delta in deltas:
        if delta.row.startswith("layer ") and None in delta.shapes:
            alone.setdefault((delta.relation, delta.row), []).append(delta)
    groups: dict[tuple[Any, ...], list[TensorDelta]] = {}
    for delta in deltas:
        layered = delta.row.startswith("layer ")
        lacking = alone.get((delta.relation, delta.row), [])
        if len(lacking) > _FEW:
            key: tuple[Any, ...] = (delta.relation, tuple(d.column for d in lacking))
        else:
            shapes = delta.shapes if delta.relation == "shape" else None
            key = (delta.column if layered else delta.name, layered, delta.relation, delta.note, shapes)
        groups.setdefault(key, []).append(delta)
    return [(_group_name(fold_names(d.name for d in found), len(found)), found) for found in groups.values()]


def _group_name(names: Sequence[str], count: int) -> str:
    """Folded names; of many only what they begin with and their number."""
    if len(names) <= _FEW:
        return ", ".join(names)
    columns = zip(*(name.split(".") for name in names), strict=False)
    begin = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns)]
    return f"{'.'.join([*begin, '*'])} ({count} tensors)"


def _table(groups: Sequence[tuple[str, list[TensorDelta]]]) -> Iterator[str]:
    if not groups:
        return
    from convert.terminal import screen_width

    shown = groups[:_TENSORS]
    room, wide = screen_width() or 200, min(64, max(len(name) for name, _ in shown))
    above = wide + 64 > room  # names stand above their numbers on a narrow screen
    if above:
        wide = 0
    yield f"  {'':{wide}}  {'':11} {'max |Δ|':>9} {'rel. err':>9} {'cosine':>10} {'changed':>8}"
    for name, found in shown:
        first = found[0]
        words = first.relation.replace("_", " in ").replace("in a", "in A").replace("in b", "in B")
        if above:
            yield f"  {_cut(name, room - 2)}"
        line = f"  {'' if above else _cut(name, wide):{wide}}  {words:11}"
        if first.max_abs is not None:
            error = max(d.error or 0.0 for d in found)
            cosine = min((d.cosine for d in found if d.cosine is not None), default=None)
            line += f" {max(d.max_abs or 0.0 for d in found):9.3g} {_number(error):>9}"
            line += f" {'–' if cosine is None else f'{cosine:.7f}':>10} {max(d.changed or 0 for d in found):8.3%}"
        elif first.relation == "shape":
            line += f" A {list(first.shapes[0] or ())}, B {list(first.shapes[1] or ())}"
        types = dict.fromkeys(d for d in first.dtypes if d)
        # How values were rounded follows from the types, and is in the message above.
        said = "" if first.note is None or first.same else f"  {first.note}"
        yield line + f"  {' / '.join(types)}" + said
    if len(groups) > _TENSORS:
        yield f"  … and {len(groups) - _TENSORS} more lines; --json has all"


def _number(value: float) -> str:
    return f"{value:.2e}" if math.isfinite(value) else "inf"


def _cut(name: str, wide: int) -> str:
    return name if len(name) <= wide else "…" + name[1 - wide :]
