"""Records of runs for reports."""
