"""Descriptions of execution providers, one file each, all data. Importing this package imports nothing."""
