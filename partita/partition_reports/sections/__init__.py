"""Sections of a report as plain text and data, shared by all views."""
