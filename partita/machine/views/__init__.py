"""What a machine offers: one file per view."""
