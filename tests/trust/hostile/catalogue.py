"""All hostile inputs."""

from __future__ import annotations

from collections.abc import Iterator

from tests.trust.hostile import folder_cases, stranger_cases, tensor_cases, text_cases, torch_cases
from tests.trust.hostile.harness import Case


def cases() -> Iterator[Case]:
    """Every input, one group after the other; names are unique."""
    for module in (torch_cases, tensor_cases, folder_cases, text_cases, stranger_cases):
        yield from module.cases()
