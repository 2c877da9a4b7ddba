"""The config of a source: found, read, brought into the hub's form, and completed from shapes.

Head counts do not follow from shapes; a source without a config and without ``--config`` or ``--size`` is refused with
the counts that would fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert import config as configs
from convert import shapes
from convert.config_values import check_frame
from convert.errors import ConvertError, FormatError, Problem, UsageError
from convert.formats.spec import Container, TensorSpec
from convert.gguf_record import with_scaling
from convert.json_file import AGAIN
from convert.locate import CONFIG_NAMES, Found
from convert.table import MappingTable, families, load_table
from convert.unstated import states_theta

if TYPE_CHECKING:
    from convert.checkpoint import Options


def find_config(
    found: Found, containers: list[Container], options: Options, wrapped: dict[str, Any]
) -> tuple[dict[str, Any] | None, str | None]:
    """The raw config and whose spelling it is in; (None, None) where there is none.

    Raises:
        UsageError: ``--config`` names no file.
        ConvertError: The file is no config of a known kind.
    """
    if isinstance(options.config, Mapping):
        raw, path = configs.plain(options.config), Path("config")
    elif options.config is not None:
        path = Path(options.config)
        path = next((path / name for name in CONFIG_NAMES if (path / name).is_file()), path)  # of another checkpoint
        if not path.is_file():
            raise UsageError(f"--config {path}: no such file.", hint=f"A folder has one of {', '.join(CONFIG_NAMES)}.")
        raw = configs.read_json(path)
    elif found.format == "gguf":
        return dict(containers[0].metadata), "gguf"
    elif found.config is not None:
        path = found.config
        raw = configs.read_json(path)
    elif wrapped:
        raw, path = wrapped, found.files[0]
    else:
        return None, None
    if not isinstance(raw, dict):
        raise ConvertError(Problem("config", f"{path.name} is not a JSON object.", file=str(path), hint=AGAIN))
    if problems := list(check_frame(raw, str(path))):
        raise ConvertError(problems)
    layout = configs.layout_of(raw, (load_table(f) for f in families()))
    if layout is None and isinstance(raw.get("model"), dict):
        layout = configs.layout_of(raw["model"], (load_table(f) for f in families()))
    if layout is None and not wrapped:
        keys = ", ".join(map(repr, list(raw)[:6])) or "no keys"
        raise ConvertError(
            Problem(
                "config",
                f"{path.name} is no config of a kind known here: it has {keys}.",
                file=str(path),
                hint="config.json, params.json and the book's dict are known.",
            )
        )
    return (raw, layout) if layout else (None, None)


def hub_config(
    table: MappingTable,
    layout: str,
    raw: dict[str, Any] | None,
    config_layout: str | None,
    options: Options,
    record: dict[str, Any],
    tensors: dict[str, list[TensorSpec]],
    containers: list[Container],
    notes: list[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hub config, complete, and the config as its file holds it.

    Raises:
        ConvertError: There is none, and head counts do not follow from shapes; what would fit is listed. Or the last
            files of a model-parallel row are absent.
    """
    parts = max(map(len, tensors.values()))  # the shape of a tensor that some model-parallel files lack is not known
    full = shapes_of(table, layout, {n: s for n, s in tensors.items() if len(s) == parts})
    if options.size:
        published = configs.published(table, options.size)
        # What the tensors tell, a size need not: the book's own models lack biases that the published ones have.
        published = {
            k: v for k, v in published.items() if k not in table.presence or k in table.sizes[options.size.lower()]
        }
    recorded = record.get("config") if isinstance(record.get("config"), dict) else None
    if raw is not None and config_layout is not None:
        hub = configs.to_hub(table, config_layout, raw, recorded)
        if options.size:
            hub = {**published, **hub}
            if table.has_rope and not states_theta(table, raw):  # a size says more than a default
                hub = configs.with_rope(hub, published["rope_parameters"])
    elif options.size:
        hub = published
        notes.append(f"config taken from the published size {options.size}")
    elif recorded:
        hub = configs.to_hub(table, "hf", recorded)
    else:
        raise _no_config(table, layout, full)
    if config_layout == "gguf":
        hub = with_scaling(hub, tensors, record)
    stated = hub.get("head_dim")
    hub, learned = shapes.fill(table, hub, layout, full)
    if layout == "meta" and stated is None:
        _refuse_part(hub, parts)
    notes += learned if config_layout in ("hf", None) else []
    if options.context is not None:
        hub["max_position_embeddings"] = options.context
    return hub, dict(raw or {})


def _refuse_part(hub: Mapping[str, Any], files: int) -> None:
    """Without the last files of a model-parallel row all matrices are narrower, as those of a smaller model are.

    Meta's params.json has no head size, because its code divides the width by the heads; another size, seen in the
    rows of Q, is that of a part.

    Raises:
        FormatError: It is.
    """
    width, heads, size = (hub.get(k) for k in ("hidden_size", "num_attention_heads", "head_dim"))
    if not (width and heads and size) or heads * size == width:
        return
    rows = heads * size
    whole = files * width // rows if files * width % rows == 0 else None
    raise FormatError(
        Problem(
            "missing_file" if whole and whole > files else "shape",
            f"Q has {rows} rows, but dim = {width} wants {width} ({heads} heads of dim / n_heads = {width // heads})"
            + (f"; {files} of {whole} model-parallel files would have {rows}." if whole and whole > files else "."),
            found=rows,
            wanted=width,
            hint="An incomplete download? Fetch the missing consolidated files. Or params.json is of another model.",
        )
    )


def shapes_of(table: MappingTable, layout: str, tensors: Mapping[str, list[TensorSpec]]) -> dict[str, tuple[int, ...]]:
    """Full shape of every tensor; model-parallel parts joined (their axis follows from the model width)."""
    from convert.match import joined_shape, model_width

    width = model_width(table, layout, tensors)
    return {name: joined_shape(specs, width) for name, specs in tensors.items()}


def _no_config(table: MappingTable, layout: str, full: Mapping[str, tuple[int, ...]]) -> ConvertError:
    name = {
        row.id: ((table.prefix.get(layout, "") if row.in_block else "") + row.names[layout]).replace("{l}", "0")
        for row in table.rows.values()
        if layout in row.names
    }
    q, k = full.get(name.get("block.attn.q", "")), full.get(name.get("block.attn.k", ""))
    rows = (q[0], k[0]) if q and k else _fused_rows(table, layout, full)
    candidates = shapes.head_candidates({}, *rows) if rows else []
    return ConvertError(
        Problem(
            "config",
            "there is no config, and head counts do not follow from tensor shapes."
            + (f" These fit: {'; '.join(candidates)}." if candidates else ""),
            wanted="a config",
            hint="Give one with --config FILE (config.json, params.json or the book's dict), or --size "
            f"{{{','.join(sorted(table.sizes))}}}.",
        )
    )


def _fused_rows(table: MappingTable, layout: str, full: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """Rows of q and of k where both lie in one stored tensor, in equal parts."""
    for fused in table.fused:
        parts = [table.rows[p] for p in fused.parts]
        if fused.layout != layout or not {"block.attn.q", "block.attn.k"} <= set(fused.parts):
            continue
        name = (table.prefix.get(layout, "") + fused.name).replace("{l}", "0")
        shape = full.get(name)
        if shape and len(shape) > fused.axis and len({tuple(d.text for d in p.shape) for p in parts}) == 1:
            rows = shape[fused.axis] // len(parts)
            return rows, rows
    return None
