"""The peers as child processes, each in the peer's own environment."""
