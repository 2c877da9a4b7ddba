# Sourced by examples/quickstart.sh and tests/run.sh: finds a Python that can hold the product, and makes environments.

# The first Python >= 3.11 that can make a virtual environment; $PYTHON overrules the search.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "No Python 3.11 or newer with the venv module was found (tried: ${PYTHON:-python3, python3.11 to python3.14})." >&2
    echo "Install one (on Debian and Ubuntu also the package python3-venv), or name it: PYTHON=/path/to/python3 bash $0" >&2
    return 1
}

# make_env FOLDER STAMP_INPUT…: a new environment unless the one there was finished from the same inputs.
# Returns 0 when the caller must install into it, 1 when it is up to date.
make_env() {
    local folder=$1 python stamp
    shift
    python=$(find_python) || exit 1
    stamp=$({ "$python" -V; cat "$@"; } | cksum)
    env_stamp=$stamp
    if [ -x "$folder/bin/python" ] && [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ]; then
        return 1
    fi
    rm -rf "$folder"
    "$python" -m venv "$folder" || exit 1
    return 0
}

# Written last, so that an interrupted installation is never taken for a finished one.
finish_env() {
    printf '%s\n' "$env_stamp" > "$1/.stamp"
}
