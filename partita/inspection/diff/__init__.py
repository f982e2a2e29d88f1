"""Differences between two packages: the comparison, its document and its views."""
