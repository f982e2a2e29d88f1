"""`partita bench`: the record of measurements, its verdict, sections and views."""
