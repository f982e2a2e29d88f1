"""Scripts for those who work on Partita; no wheel has them."""
