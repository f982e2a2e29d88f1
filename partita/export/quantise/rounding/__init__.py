"""Rounding that reads a text: calibration, and the original model with rounded weights."""
