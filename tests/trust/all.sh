#!/usr/bin/env bash
# Runs every script of this folder at one commit, one after another, and keeps what each prints, for tests/TRUST.md.
#
#   bash tests/trust/all.sh OUT               two hours on two cores; 25 GB of disk
#   RUNS=20000 KILLS=10 EVERY=20 bash tests/trust/all.sh OUT      a small round of everything
#
# PYTHON is the interpreter to use (default: the one of tests/run.sh). The fuzzer needs `pip install atheris`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="$(mkdir -p "${1:?where the figures go}" && cd "$1" && pwd)"
python="${PYTHON:-.venv-test/bin/python}"
runs="${RUNS:-300000}"
code=0
{
    git log -1 --format="commit %h, %cs" 2>/dev/null
    git status --short 2>/dev/null | sed 's/^/changed since: /'
    "$python" --version
    uname -sr
    nproc
} >"$out/where.txt"

run() { # NAME MODULE ARGUMENT...
    local name="$1" started=$SECONDS
    shift
    echo "+ python -m $*"
    if "$python" -m "$@" >"$out/$name.txt" 2>&1; then
        echo "  ok, $((SECONDS - started)) s"
    else
        code=1
        echo "  FAILED, $((SECONDS - started)) s: see $out/$name.txt"
    fi
    tail -n 2 "$out/$name.txt" | sed 's/^/  /'
}

run kill_points tests.trust.kill_points --kills "${KILLS:-200}"
run killed_ranks tests.trust.killed_ranks --kills "${KILLS:-200}"
run power_cuts tests.trust.power_cuts --cuts "${KILLS:-200}"
run faults tests.trust.faults --every "${EVERY:-1}"
run hostile tests.trust.hostile.tally --all
if "$python" -c "import atheris" 2>/dev/null; then
    for reader in safetensors torch gguf index config sentencepiece tensorflow; do
        run "fuzz-$reader" tests.trust.fuzz "$reader" --runs "$runs" --out "$out/fuzz"
    done
else
    code=1
    echo "+ tests.trust.fuzz: not run, atheris is not installed"
fi
run memory tests.trust.memory
run hashing tests.trust.hashing
run load tests.trust.load
exit "$code"
