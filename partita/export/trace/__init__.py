"""From modelling code to an ONNX graph: fake tensors, the cache plug, and the operators that are written."""
