"""Whole-graph changes: names, sizes, cache types, batches. Node rewrites are in passes/."""
