"""Experiments on nodes that fell back: the same node alone, one thing changed at a time, in a child process."""
