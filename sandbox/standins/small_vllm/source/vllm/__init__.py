"""Stands in for vLLM: a version and one compiled module."""

__version__ = "99.75.0"
