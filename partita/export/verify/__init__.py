"""Verification of a package against its source model: known answer, smoke run, quality."""
