"""Comparison of two reports, two packages or two support tables."""
