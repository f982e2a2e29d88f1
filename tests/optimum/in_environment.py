"""Runs in optimum's environment: variants of its exports, and what its ORTModelForCausalLM generates.

    python in_environment.py REQUEST.json

{"do": "fp16" or "int8", "source": CHECKPOINT or EXPORT, "out": FOLDER}, or
{"do": "generate", "folders": [FOLDER, ...], "prompt": IDS, "count": N, "answer": FILE}: the greedy tokens by folder, or
the error that it raises. A list of requests is done in turn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def fp16(request: dict[str, Any]) -> None:
    """What `optimum-cli export onnx --dtype fp16` writes."""
    from optimum.exporters.onnx import main_export  # type: ignore[import-not-found]

    task = "text-generation-with-past"
    main_export(request["source"], request["out"], task=task, dtype="fp16", do_validation=False, no_post_process=True)


def int8(request: dict[str, Any]) -> None:
    """What `optimum-cli onnxruntime quantize --avx512_vnni` writes, with the files beside it."""
    from optimum.onnxruntime import ORTQuantizer  # type: ignore[import-not-found]
    from optimum.onnxruntime.configuration import AutoQuantizationConfig  # type: ignore[import-not-found]

    quantizer = ORTQuantizer.from_pretrained(request["source"], file_name="model.onnx")
    config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
    quantizer.quantize(save_dir=request["out"], quantization_config=config)


def generate(request: dict[str, Any]) -> None:
    """Greedy tokens of every folder, as its users get them."""
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    ids = torch.tensor([request["prompt"]])
    found: dict[str, Any] = {}
    for folder in request["folders"]:
        try:
            model = ORTModelForCausalLM.from_pretrained(folder, use_io_binding=request.get("io_binding"))
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request["count"],
                do_sample=False,
                num_beams=1,
                pad_token_id=0,
                eos_token_id=None,
            )
            found[folder] = out[0, ids.shape[1] :].tolist()
        except Exception as error:  # noqa: BLE001 - what it says is the answer
            found[folder] = f"{type(error).__name__}: {error}"
    Path(request["answer"]).write_text(json.dumps(found), encoding="utf-8")


def main(path: Path) -> None:
    """Do what the file asks for."""
    asked = json.loads(path.read_text(encoding="utf-8"))
    for request in asked if isinstance(asked, list) else [asked]:
        {"fp16": fp16, "int8": int8, "generate": generate}[request["do"]](request)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
