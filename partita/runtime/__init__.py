"""From a package to tokens, and to the facts of the run. Importing this package imports nothing."""
