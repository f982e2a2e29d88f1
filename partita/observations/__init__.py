"""The ground floor: what was observed of a run, as plain facts, and the words that all rooms share. Imports no room."""
