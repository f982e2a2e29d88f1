"""ONNX Runtime: sessions, device tensors, installed build, errors and log. Only this package imports it."""
