"""Ways to look at a report: one view per file, discovered by file name."""
