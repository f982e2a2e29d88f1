"""Speculation: who guesses what follows (`ngram`, `draft`), and how many guesses are worth a step (`governor`)."""
