"""Whether a package computes what its source model does: known answer, smoke run, quality, twins."""
