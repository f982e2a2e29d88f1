"""What a package or folder holds: one file per view, found by its name."""
