"""Weights as lazy arrays, from the files of a checkpoint to external data."""
