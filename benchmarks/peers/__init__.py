"""Partita beside its peers, run by `make bench-peers`: each in a process of an environment of its own, in turns."""
