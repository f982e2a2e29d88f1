"""optimum's exporter in an environment of its own: optimum-onnx needs transformers before 4.58, and Partita needs 5.

environment  where that environment is, and what it says of itself
child        the script that runs there; it imports nothing of Partita's
configs      a config as transformers 4 reads it
graphs       what optimum wrote, as graphs and a contract
"""
