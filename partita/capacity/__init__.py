"""Memory and speed of a model, computed from its graph and contract: `partita plan`."""
