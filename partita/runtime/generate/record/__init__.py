"""What a run records for its report."""
