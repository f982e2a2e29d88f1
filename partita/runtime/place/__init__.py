"""Placement of any ONNX file: read, checked, opened and run."""
