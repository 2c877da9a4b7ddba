"""What ggml alone needs to quantise the model's weights as q4_k_m on all cores: no reading, no writing.

Prints the seconds. Llama 3.2 1B's shape (16 layers); the usual mixture: the tied embedding, and value and down
matrices of half the layers, as Q6_K, the rest as Q4_K. One block of random values is quantised again and again.
"""

import ctypes
import importlib.util
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

Q4_K, Q6_K = 12, 14
BYTES = {Q4_K: 144, Q6_K: 210}  # per 256 elements
LAYERS, ROWS, COLUMNS = 16, 512, 2048
more = [i < LAYERS // 8 or i >= 7 * LAYERS // 8 or (i - LAYERS // 8) % 3 == 2 for i in range(LAYERS)]
embedding, attention, value, mlp = 128256 * 2048, (2048 * 2 + 512) * 2048, 512 * 2048, 8192 * 2048
elements = {Q6_K: embedding + sum(more) * (value + mlp)}
elements[Q4_K] = LAYERS * (attention + 2 * mlp) + (LAYERS - sum(more)) * (value + mlp)

spec = importlib.util.find_spec("libggml")
library = ctypes.CDLL(str(Path(spec.submodule_search_locations[0]) / "lib64" / "libggml-base.so"))
quantize = library.ggml_quantize_chunk
quantize.restype = ctypes.c_size_t
quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.02)


def work(kind: int) -> None:
    out = np.empty(values.size // 256 * BYTES[kind], np.uint8)
    quantize(kind, values.ctypes.data, out.ctypes.data, 0, ROWS, COLUMNS, None)


jobs = [kind for kind, count in elements.items() for _ in range(round(count / values.size))]
work(Q4_K)  # fills ggml's tables
start = time.perf_counter()
with ThreadPoolExecutor(os.cpu_count()) as pool:
    list(pool.map(work, jobs))
print(time.perf_counter() - start)
