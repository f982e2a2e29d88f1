"""Packed weights in a graph: layouts, operators, and weights that are taken as they are stored."""
