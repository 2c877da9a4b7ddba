from __future__ import annotations

import pytest
import torch

from tests.reference.models import one_thread  # noqa: F401


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What is drawn must not depend on which tests ran before in this process."""
    torch.manual_seed(0)
