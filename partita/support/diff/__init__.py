"""Differences between two support tables: the comparison, its document and its views."""
