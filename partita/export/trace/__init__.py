"""Tracing of modelling code to an ONNX graph: fake tensors, cache plug, emitted operators."""
