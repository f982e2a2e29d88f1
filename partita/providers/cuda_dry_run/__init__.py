"""CUDA without a GPU: the real CUDA execution provider over stub CUDA libraries, in a child process.

Everything that ONNX Runtime decides when it opens a session is real then: which nodes the CUDA provider takes and which
it refuses, the copies between devices, the plan, whether the session can be captured into a CUDA graph. What a device
would compute is not: device memory reads as zeros and no time means anything. Nor does a run that succeeds prove that
the device has every kernel. Does not start the child and does not import ONNX Runtime; see `standins.py` for what a
parent and its child call.
"""
