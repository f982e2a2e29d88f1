"""The outcome of a check: one file per view."""
