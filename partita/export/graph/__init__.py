"""Changes of a traced graph as a whole: names, sizes, cached types, batches. Rewrites of its nodes are in passes/."""
