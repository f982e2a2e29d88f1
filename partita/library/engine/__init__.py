"""The engine of a loaded package: scheduler, and the worker process that it may run in."""
