#!/usr/bin/env bash
# Everything that needs a CUDA device: verify in float32 and bfloat16 for every family and for SmolLM2, whole and layer by
# layer (also Llama 3.2 1B's shape in bfloat16, which takes 6 GB of disk while it lasts), load_into on cuda. Prints the
# figures, and writes them to tests/gpu.md. Where there is no device it says so and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"

if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "skipped: $python has no torch"
    exit 0
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "skipped: torch $("$python" -c 'import torch; print(torch.__version__)') finds no CUDA device on this machine"
    exit 0
fi
device="$("$python" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name())')"
echo "$device"
export GPU_FIGURES="$PWD/tests/gpu.md"
cat >"$GPU_FIGURES" <<NOTE
# Figures of \`tests/gpu.sh\`

$device. Written by the last run; distances are those of \`convert verify\`.

| what | figures |
| --- | --- |
NOTE
exec "$python" -m pytest -m gpu -s -v tests "$@"
