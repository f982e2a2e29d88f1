"""`partita bench`: record of the measurements, verdict, sections and views."""
