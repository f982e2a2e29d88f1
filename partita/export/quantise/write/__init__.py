"""Quantised weights in a graph: layouts, operators, and stored integers."""
