"""Facts about one run, the report built from them, and the views that show it. Needs only pydantic and rich."""
