"""Containers: they know files and nothing of models."""
