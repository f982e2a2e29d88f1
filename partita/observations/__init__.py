"""Facts observed about a run, and shared codes and text formats. Imports no other package of Partita."""
