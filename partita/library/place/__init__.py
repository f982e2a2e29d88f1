"""Placement, experiments and support tables."""
