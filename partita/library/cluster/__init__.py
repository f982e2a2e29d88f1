"""The rows of a file on the machines of a Ray cluster: workers that hold a loaded package, fed by Ray Data."""
