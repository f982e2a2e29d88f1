"""Weights as small integers: which are packed and how (`plan`), what they become (`packed`, `operators`, `rewrite`),
and the original model with the same rounded weights, which the graph is checked against (`reference`).
"""
