"""Folders that Partita did not write: how their contract is inferred, so that everything else treats them as packages.

facts      what an ONNX file says of itself, as plain data; everything but `reading` and `folder` is pure on it
reading    the facts of a file on disk, read without weights
layouts    which files of a folder are models, and which of them is meant
evidence   what config.json or genai_config.json say of the model
genai_config  the file of onnxruntime-genai, checked as a whole
ports      what inputs and outputs mean
carrying   how a graph makes the next value of what it caches
states     which input a step reads as the past of which output, and whether both may be one buffer
shapes     sizes of states, and how long a text may be
agreement  whether a configuration says the same as the graph
written    a contract that the user wrote down (--contract)
inference  all of that together: a contract, or what cannot be understood
lora       adapters beside a graph: inputs with defaults, and files of values for them
folder     a folder as a manifest
"""
