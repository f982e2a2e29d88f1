"""Placement, probes and support tables, as functions."""
