"""Parts of the HTML page: what its sections hold as plain data, and the template, style and script that show it."""
