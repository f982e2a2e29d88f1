"""CUDA without a GPU: the real CUDA execution provider over stub CUDA libraries, in a child process.

Decisions at session creation are real: node placement, copies, the plan, CUDA graph capture. Computation is not: device
memory reads as zeros, times are meaningless, and a successful run does not prove that the device has every kernel.
`stub_build.py` has the functions for the parent and the child process.
"""
