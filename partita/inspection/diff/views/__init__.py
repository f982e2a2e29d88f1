"""The difference of two packages: one file per view, found by its name."""
