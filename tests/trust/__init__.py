"""Scripts that try to lose something: each prints its figures, which stand in ``tests/TRUST.md``."""
