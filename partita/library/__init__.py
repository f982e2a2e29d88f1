"""What Partita does, as functions for programs. Nothing here prints, ends the process, or knows a command line."""
