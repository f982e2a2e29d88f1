"""ONNX Runtime: sessions, tensors on devices, what is installed, its errors and its log. Nobody else imports it."""
