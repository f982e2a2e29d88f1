"""`partita bench`: the record of what was measured, its verdict, its sections and its views."""
