"""Hostile inputs, made by builders, and a harness that watches what the commands do with them."""
