"""Checks of a report against requirements and a baseline."""
