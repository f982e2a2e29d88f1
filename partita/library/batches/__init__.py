"""Batch inference from a prompt file to an answer file: rows, files, resuming, clusters."""
