"""The page of a diagnosis.

Reads of ``as_json()`` (schema ``convert.diagnose/1``): ``verdict`` (``good``, ``broken``, ``undecided``), ``message``,
``hints``, ``causes`` (a list of ``fault``, ``words``, ``confidence``, ``evidence`` (str or list of str), ``loss``, ``fix``
(the whole command or None)), ``probe`` (``order``, ``expected``, ``agrees``, ``confidence``, and the evidence as numbers),
``findings`` (odd tensors, as :meth:`convert.errors.Problem.as_json` gives them; also read from ``tensors``).

Reads of ``detail()``, every key optional::

    {
      "baseline":   {"loss": float, "low": float, "high": float,  # nats per token; low and high: bootstrap, 95 %
                     "tokens": int},
      "hypotheses": [{"name": "qk-permuted", "words": str,        # what is supposed to be wrong
                      "loss": float | None, "low": float, "high": float,
                      "gain": float,                              # baseline loss minus loss, the paired mean
                      "gain_low": float, "gain_high": float,      # its bootstrap interval
                      "tokens": int,                              # on how long a text (losses compare within one length)
                      "baseline": float,                          # the baseline's loss on that same text
                      "fix": "unpermute-qk" | None,
                      "explains": bool,                           # whether the verdict names it
                      "skipped": str | None}],                    # why it was not run
      "margin":     float,                                        # what a gain must exceed
      "control":    {"name": str, "loss": float},                 # the model broken on purpose: what a fault costs here
      "probe":      [{"row": "layer 0", "half": float, "interleaved": float}],   # h/r and i/r of that layer, Q and K joined
      "against":    {"positions": …, "logits": …, "layers": …, "departs": …, "tensors": …},  # as convert.html.verify has them
      "tensors":    […],                                          # as convert.html.verify has them (odd ones are enough)
      "sides":      {"a": {…}, "b": {…}},                         # a: the model; b: the good copy, with --against
      "absent":     {"hypotheses": "only the probe was asked for", …},
    }
"""

from __future__ import annotations
