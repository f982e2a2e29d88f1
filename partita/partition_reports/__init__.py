"""The partition report: built from the facts of a run, with its views. Needs only pydantic and rich."""
