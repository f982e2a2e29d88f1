"""Contents of a folder or file for `partita inspect`, read without running a model or loading weights."""
