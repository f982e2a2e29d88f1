"""The difference of two reports: one file per view."""
