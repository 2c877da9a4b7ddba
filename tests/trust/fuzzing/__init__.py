"""Mutated inputs for every reader, and what the formats' own libraries read from them."""
