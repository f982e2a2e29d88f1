"""Placement of any ONNX file: reads, checks, opens and runs it."""
