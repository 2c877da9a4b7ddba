"""What runs inside the subprocess: real llama.cpp, by its prebuilt Python package. A script, not for import.

Reads one request as JSON from standard input and writes the log-probabilities as a ``.npy`` file. It imports nothing
of this product, so that nothing here can vouch for itself. llama.cpp may abort the whole process; the parent,
:mod:`convert.engines.llama_cpp`, turns that into a message.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import xllamacpp


def settings(request: dict[str, Any]) -> Any:
    """The parameters: exact attention, one slot, room for the longest prompt."""
    params = xllamacpp.CommonParams()
    params.model.path = request["path"]
    # Flash attention and the 16-bit cache each cost 5e-3 in log-probabilities; off together they cost 1e-5.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    longest = max(map(len, request["prompts"]))
    params.n_ctx = -(-(longest + 2) // 256) * 256  # llama.cpp rounds up to 256 itself
    params.n_batch = params.n_ubatch = params.n_ctx
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.fit_params = False
    params.ctx_shift = False
    params.cpuparams.n_threads = request["threads"]
    params.cpuparams.poll = 0  # waiting threads sleep, so that the machine stays usable
    return params


def next_token(server: Any, prompt: list[int], vocab_size: int, printable: int) -> np.ndarray:
    """Log-probabilities of the token after ``prompt``, float32 ``[V]``.

    They are those before sampling. What is sampled is made to be the token ``printable``: a token that is no
    whole text (part of a character, or an end) is held back, and its probabilities with it.
    """
    body = {"prompt": prompt, "n_predict": 1, "n_probs": vocab_size, "logprobs": vocab_size, "temperature": 1.0}
    answer = server.handle_completions(body | {"logit_bias": [[printable, 1e6]]})
    if not isinstance(answer, dict) or not answer.get("choices") or not answer["choices"][0].get("logprobs"):
        raise ValueError(f"llama.cpp answered {str(answer)[:300]}")
    seen = answer["usage"]["prompt_tokens"]
    if seen != len(prompt):
        raise ValueError(f"llama.cpp ran {seen} tokens where {len(prompt)} were given")
    likely = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    row = np.full(vocab_size, np.nan, np.float32)
    for entry in likely:
        row[entry["id"]] = entry["logprob"]
    row[row < -1e30] = -np.inf  # a probability of 0 in float32 comes as the lowest number there is
    missing = int(np.isnan(row).sum())
    if missing:
        raise ValueError(
            f"llama.cpp gave {len(likely)} log-probabilities; {missing} of {vocab_size} are missing or NaN"
        )
    # llama.cpp sums the vocabulary's probabilities in float32, one by one: with 49,152 tokens that shifts all
    # logarithms alike, by 2e-4. The shift is taken out, as it is no property of the model.
    return (row - np.log(np.exp(row.astype(np.float64)).sum())).astype(np.float32)


def main() -> None:
    """Answer one request, then leave without llama.cpp's clean-up, which may hang on its threads."""
    request = json.load(sys.stdin)
    server = xllamacpp.Server(settings(request))
    rows = [next_token(server, prompt, request["vocab_size"], request["printable"]) for prompt in request["prompts"]]
    np.save(request["out"], np.stack(rows))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(f"ENGINE {error}", file=sys.stderr, flush=True)
        os._exit(2)
