"""What views set type with: text at the width of a terminal, and pages for a browser."""
