"""Opens a session on a provider chain, or raises an error with the nodes that the chain does not run."""
