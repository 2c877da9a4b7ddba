"""Rotary tables that a checkpoint holds beside its weights: dropped, but asked whether the config's theta is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from convert import rope
from convert.formats.spec import TensorSpec
from convert.source import StridedSource, open_source

if TYPE_CHECKING:
    from convert.match import Match


#: Positions of a stored cosine table that are compared; at the first few every theta gives nearly the same.
_POSITIONS = 64


def check_frequencies(out: Match, name: str, spec: TensorSpec, kind: str) -> None:
    """Stored rotary tables are dropped, but they tell which theta the model was made with."""
    if not spec.type.is_float or 0 in spec.shape or spec.nbytes > 1 << 30:
        return
    from convert.cast import to_float32

    settings = rope.primary(out.checkpoint.config["rope_parameters"])
    source = open_source(spec, out.checkpoint.pool)
    if kind == "cos" and (len(spec.shape) != 2 or spec.shape[1] % 2 or isinstance(source, StridedSource)):
        return
    rows = min(source.shape[0], _POSITIONS) if kind == "cos" else source.shape[0]
    found = to_float32(source.read(0, rows), spec.dtype)
    width = out.checkpoint.dims.turning() if kind == "cos" else 2 * len(found)
    # Meta's and old Hugging Face files hold unscaled frequencies, in up to bfloat16's precision.
    wanted = (
        np.array(rope.inverse_frequencies(settings, out.checkpoint.dims.turning())),
        np.array(rope.inverse_frequencies({**settings, "rope_type": "default"}, width)),
    )
    amplitude = settings.get("attention_factor", 1.0)  # YaRN's
    if not any(_agrees(found, frequencies, kind, amplitude) for frequencies in wanted):
        theta = out.checkpoint.config["rope_theta"]
        out.notes.append(
            f"{name} does not agree with rope_theta = {theta:g}; it is dropped, but the config may be wrong"
        )


def _agrees(found: np.ndarray, frequencies: np.ndarray, kind: str, amplitude: float) -> bool:
    """Whether a table of frequencies, or of the cosines of positions times frequencies, is made of these."""
    if kind != "cos":
        found = found.reshape(-1)
        return found.shape == frequencies.shape and np.allclose(frequencies, found, rtol=1e-2, atol=1e-6)
    orders = (np.concatenate([frequencies, frequencies]), np.repeat(frequencies, 2))
    tables = (amplitude * np.cos(np.outer(np.arange(len(found)), order)) for order in orders)
    return any(found.shape == table.shape and bool(np.abs(found - table).max() <= 2e-2) for table in tables)
