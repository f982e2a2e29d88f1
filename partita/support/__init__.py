"""The support table of a provider: its record, what it says in sections, its views, and the difference of two."""
