"""Rotary tables that a checkpoint holds beside its weights: dropped, but asked whether the config's theta is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from convert import rope
from convert.formats.spec import TensorSpec
from convert.source import StridedSource, open_source

if TYPE_CHECKING:
    from convert.match import Match


def check_frequencies(out: Match, name: str, spec: TensorSpec, kind: str) -> None:
    """Stored rotary tables are dropped, but they tell which theta the model was made with."""
    if not spec.type.is_float or 0 in spec.shape or spec.nbytes > 1 << 30:
        return
    from convert.cast import to_float32

    settings = rope.primary(out.checkpoint.config["rope_parameters"])
    source = open_source(spec, out.checkpoint.pool)
    wanted = np.array(rope.inverse_frequencies(settings, int(out.checkpoint.dims["hd"])))
    if kind == "cos":
        if len(spec.shape) != 2 or spec.shape[0] < 2 or isinstance(source, StridedSource):
            return
        found = to_float32(source.read(1, 2), spec.dtype).reshape(-1)
        wanted = np.cos(np.concatenate([wanted, wanted]))
    else:
        found = to_float32(source.read(0, source.shape[0]), spec.dtype).reshape(-1)
    # Meta's and old Hugging Face files hold unscaled frequencies, in up to bfloat16's precision.
    plain = np.array(rope.inverse_frequencies({**settings, "rope_type": "default"}, 2 * len(found)))
    fits = [w for w in (wanted, plain) if w.shape == found.shape and np.allclose(w, found, rtol=1e-2, atol=1e-6)]
    if not fits:
        theta = out.checkpoint.config["rope_theta"]
        out.notes.append(
            f"{name} does not agree with rope_theta = {theta:g}; it is dropped, but the config may be wrong"
        )
