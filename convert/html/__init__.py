"""Reports to look at: one self-contained HTML file from the result of verify, diagnose or diff.

A page is built from ``result.as_json()`` and ``result.detail()`` and nothing else. ``as_json()`` is the documented, small
result; ``detail()`` is plain data (dicts, lists, numbers, strings, None; no arrays, no tensors) for the figures. Which
keys of ``detail()`` the pages read is written in :mod:`convert.html.verify`, :mod:`convert.html.diagnose` and
:mod:`convert.html.diff`. A key that is missing (or empty, or None) leaves out its section, and the page says why in a
sentence; ``detail()["absent"] = {"layers": "the models ran whole"}`` gives that sentence. A number that is NaN or
infinite is allowed everywhere: it is shown as such and left out of the figure.

Whoever makes a result keeps it small: at most 2,000 sampled logits, one entry per layer and one per tensor. Longer lists
are thinned out here and the page says so. This package computes nothing about models and imports no torch.
"""

from __future__ import annotations
