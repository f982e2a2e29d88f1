"""Quantised weights: which weights (`plan`), their layout and operators, and the source model with the same values."""
