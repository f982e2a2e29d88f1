"""A package against its known answer: replay, comparison, quality."""
