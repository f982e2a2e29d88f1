"""The difference of two support tables: one file per view, found by its name."""
