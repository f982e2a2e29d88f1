"""A package on disk: its folder, its manifest, and the contract of its graphs."""
