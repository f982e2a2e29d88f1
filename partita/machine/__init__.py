"""The machine report of `partita providers`: record and view."""
