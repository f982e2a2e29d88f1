"""The laboratory: models of one node, opened on a real provider in a child process, and what came of each."""
