"""The page of a difference.

Reads of ``as_json()`` (schema ``convert.diff/1``): ``verdict`` (``equal``, ``close``, ``different``), ``message``,
``hints``, ``missing`` and ``extra`` (lists of names: in A only, in B only), ``shapes`` and ``dtypes`` (lists of ``name``,
``a``, ``b``), ``config`` and ``tokenizer`` (lists of ``key``, ``a``, ``b``), ``counts`` (relation → number of tensors),
``tolerance``.

Reads of ``detail()``, every key optional::

    {
      "sides":   {"a": {"path": str, "layout": str, "family": str, "dtypes": {…}}, "b": {…}},
      "tensors": [{"name": str, "row": "layer 3" | "top", "column": "att.W_query",
                   "relation": "equal" | "turned" | "close" | "reordered" | "different" | "shape" | "only_a" | "only_b",
                   "error": float | None, "cosine": float | None, "max_abs": float | None, "changed": float | None}],
      "control": {"name": str, "error": float},    # what a planted fault would look like in the same measure
      "absent":  {"tensors": "why", …},
    }
"""

from __future__ import annotations
