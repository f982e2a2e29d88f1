"""Verification of a package: replay of reference logits, comparison, quality."""
