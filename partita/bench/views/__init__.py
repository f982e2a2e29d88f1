"""The result of a bench: one file per view, found by its name."""
