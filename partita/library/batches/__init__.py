"""A file of prompts in, a file of answers out: rows, files, and what makes a run go on after it was killed."""
