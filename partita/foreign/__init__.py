"""Foreign folders: inference of a contract for folders of other exporters, so that they can be used like packages.

facts      the contents of an ONNX file as plain data; every module except `reading` and `folder` is pure on it
reading    the facts of a file on disk, read without weights
layouts    the model files of a folder, and the choice among them
evidence   facts about the model from config.json or genai_config.json
genai_config  schema of onnxruntime-genai's file
ports      roles of inputs and outputs
carrying   how a graph updates its cache
states     pairs of past input and present output, and whether both may share a buffer
shapes     sizes of states, and the maximum length
agreement  comparison of a configuration with the graph
written    a contract file of the user (--contract)
inference  the whole inference: a contract, or an error
lora       adapter inputs with defaults, and files of values for them
folder     a folder as a manifest
"""
