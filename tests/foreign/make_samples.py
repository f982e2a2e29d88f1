"""Write the sample folders of foreign exporters again.

    python -m tests.foreign.make_samples OPTIMUM_PYTHON GENAI_PYTHON

The first has optimum-onnx 0.1.0 (constraints/peer-optimum.txt), the second onnxruntime-genai with its model builder
(constraints/peer-genai.txt); what runs in them is in `makers`. Only the files that tests read are kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.conftest import DEMO_CHECKPOINT
from tests.foreign.conftest import SAMPLES

MAKERS = Path(__file__).parent / "makers"
GENAI = ("fp32:cpu", "int4:cpu", "fp16:cuda", "int4:webgpu")
CONFIGS = ("config.json", "generation_config.json")
KEPT: dict[str, tuple[str, tuple[str, ...]]] = {
    "checkpoint": ("checkpoint", (*CONFIGS, "model.safetensors")),
    "optimum": ("optimum", (*CONFIGS, "model.onnx")),
    "first": ("pair", ("decoder_model.onnx",)),
    "merged": ("merged", ("decoder_model_merged.onnx",)),
}
"""Sample, where it is made, and its files."""
for folder in (f"genai-{name.replace(':', '-')}" for name in GENAI):
    KEPT[folder] = folder, ("genai_config.json", "model.onnx", "model.onnx.data", "tokens.json")


def run(python: str, maker: str, *words: object) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    subprocess.run([python, str(MAKERS / maker), *map(str, words)], check=True, env=environment)


def main(optimum: str, genai: str) -> None:
    """Make everything in a temporary folder, and keep what the tests read."""
    with TemporaryDirectory() as name:
        home = Path(name) / "llama"
        run(optimum, "with_optimum.py", name, DEMO_CHECKPOINT, "llama")
        run(genai, "with_genai.py", home / "checkpoint", home, home / "tokens.json", *GENAI)
        shutil.copy(home / "tokens.json", SAMPLES / "tokens.json")
        for sample, (made, files) in KEPT.items():
            (SAMPLES / sample).mkdir(exist_ok=True)
            for file in files:
                if (home / made / file).is_file():
                    (SAMPLES / sample / file).write_bytes((home / made / file).read_bytes())


if __name__ == "__main__":
    main(*sys.argv[1:3])
