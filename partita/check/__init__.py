"""Whether a report meets what is asked of it."""
