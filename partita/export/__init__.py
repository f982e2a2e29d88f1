"""Checkpoint to package. The only folder that imports torch; it does not import `partita.runtime`."""
