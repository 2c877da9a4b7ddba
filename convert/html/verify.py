"""The page of a verification.

Reads of ``as_json()`` (schema ``convert.verify/1``): ``verdict``, ``message``, ``hints``, ``device``, ``dtype``,
``n_tokens``, ``max_abs``, ``nmse``, ``kl_mean``, ``kl_max``, ``top1``, ``first_diff_position``, ``tolerance``, ``noise``,
``control`` (None, or ``name``, ``seen`` and the same five figures), ``engine``; unknown keys appear in the raw result only.

Reads of ``detail()``, every key optional::

    {
      "sides":     {"a": {"path": str, "layout": str, "family": str, "dtypes": {"BF16": 290}}, "b": {…}},
      "positions": {"kl": [float], "control_kl": [float],         # nats, one per position
                    "nmse": [float], "control_nmse": [float], "noise_nmse": [float],
                    "tolerance": float,                           # NMSE of one position
                    "tokens": [str]},                             # the text of each position, where there is one
      "logits":    {"a": [float], "b": [float], "control": [float]},   # the same sampled (position, token) pairs
      "layers":    [{"name": "embed" | "layer 0" | … | "logits",
                     "error": float,                              # NMSE of B's hidden states from A's after this step
                     "noise": float | None,                       # … of legitimate rounding
                     "control": float | None}],                   # … of the broken copy
      "departs":   {"step": "layer 3", "words": str} | None,      # where the hidden states first part
      "tensors":   [{"name": str,                                 # the reference name, whole
                     "row": "layer 3" | "top", "column": "att.W_query",
                     "relation": "equal" | "turned" | "close" | "reordered" | "different" | "only_a" | "only_b",
                     "error": float | None,                       # ||a - b|| / ||a||, in the common layout
                     "cosine": float | None, "max_abs": float | None, "changed": float | None}],  # changed: share 0..1
      "absent":    {"layers": "why there are none", …},
    }
"""

from __future__ import annotations
