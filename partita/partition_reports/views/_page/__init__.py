"""Data for the pictures of the HTML page."""
