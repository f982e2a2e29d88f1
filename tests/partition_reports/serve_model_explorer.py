"""Run by the environment of Model Explorer: serves its page with a model and node data, and prints the address.

python serve_model_explorer.py MODEL.onnx NODE_DATA.json PORT
"""

import json
import sys
from pathlib import Path

import model_explorer  # type: ignore[import-not-found]
from model_explorer.node_data_builder import GraphNodeData, NodeDataResult  # type: ignore[import-not-found]

model, node_data, port = sys.argv[1:]
fields = json.loads(Path(node_data).read_text(encoding="utf-8"))
results = {key: NodeDataResult(**result) for key, result in fields.pop("results").items()}
GraphNodeData(results=results, **fields)  # the page ignores unknown fields, its builder has none
model_explorer.visualize_from_config(
    model_explorer.config().add_model_from_path(model).add_node_data_from_path(node_data),
    host="127.0.0.1",
    port=int(port),
    extensions=["model_explorer_onnx"],
    no_open_in_browser=True,
)
