"""Checkpoint to package. The only folder that imports torch; it never imports `partita.runtime`."""
