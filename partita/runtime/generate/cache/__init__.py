"""The cache of a package: a store per kind of state, and one object that the loop asks what it can do."""
