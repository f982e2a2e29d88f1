"""Quantisation with a calibration text, and the source model with quantised weights."""
