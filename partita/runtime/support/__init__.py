"""The support table of a provider, measured: examples of operators, their variants, and the sessions that tell."""
