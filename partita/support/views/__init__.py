"""A support table: one file per view, found by its name."""
