"""The support table of a provider: record, sections, views, and comparison of two tables."""
