from __future__ import annotations

from tests.reference.models import one_thread  # noqa: F401
