"""Comparison of two reports: matching nodes and their differences."""
