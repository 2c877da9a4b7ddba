"""``python -m tests.benchmark``: what conversions cost, beside ``cp`` and the usual ways. Not run by pytest."""
