"""Lazy weights, from checkpoint files to external data."""
