"""The KV cache of a package: one store per kind of state, behind one object."""
