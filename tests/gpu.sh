#!/usr/bin/env bash
# The checks that need a CUDA device; what they say goes to the screen and into tests/gpu.md.
# PYTHON names an interpreter that has the packages of the extra `test` (default: .venv-test, made by tests/run.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv-test/bin/python}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
set +e
"$python" -m pytest -m gpu -v -rA tests/test_gpu.py 2>&1 | tee "$log"
code=${PIPESTATUS[0]}
set -e
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    {
        echo "# The GPU tests, as last run"
        echo
        "$python" -c 'import torch; print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, exit code '"$code"'")'
        echo
        echo '```'
        cat "$log"
        echo '```'
    } > tests/gpu.md
fi
exit "$code"
