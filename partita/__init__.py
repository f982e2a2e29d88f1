"""Partita: static ONNX export of Hugging Face decoders, and the truth about where they ran.

Importing this package imports nothing else: no torch, no onnxruntime, no transformers.
"""

__version__ = "0.1.0"
