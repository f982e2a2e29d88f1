"""Facts about one run, the report built from them, and the views that show it. Imports nothing heavier than pydantic."""
