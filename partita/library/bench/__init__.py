"""Benchmarks of provider chains and packages."""
