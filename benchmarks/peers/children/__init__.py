"""A peer each, as a child process in the peer's own environment. They import nothing of Partita but what is named here.

A module has `open_engine(model, threads, length)`; `serving` does the rest.
"""
