"""What a machine offers, as `partita providers` shows it: the record and its view."""
