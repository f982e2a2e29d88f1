"""Benches, as functions."""
