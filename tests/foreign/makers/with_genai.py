"""Runs in onnxruntime-genai's environment: what its builder makes of a checkpoint, and the tokens that it generates.

    python with_genai.py CHECKPOINT OUT TOKENS.json PRECISION:PROVIDER ...

Writes OUT/genai-PRECISION-PROVIDER, with tokens.json where the runtime of this machine generates from it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def build(checkpoint: str, out: Path, precision: str, provider: str) -> None:
    """What `python -m onnxruntime_genai.models.builder` writes."""
    given = {"-m": checkpoint, "-i": checkpoint, "-o": str(out), "-p": precision, "-e": provider}
    words = [word for pair in given.items() for word in pair]
    cache = ["-c", str(out.parent / "cache")]
    subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", *words, *cache], check=True)


def tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of onnxruntime-genai's own loop."""
    import numpy as np
    import onnxruntime_genai as og  # type: ignore[import-not-found]

    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    length = len(prompt) + count + 1
    # min_length keeps the end-of-text token from being chosen.
    params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=1)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([prompt], np.int32))
    found = []
    for _ in range(count):
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    return found


def main(checkpoint: str, out: Path, known: Path, wanted: list[str]) -> None:
    """Build each, and generate where it is for the CPU."""
    answer = json.loads(known.read_text())
    for each in wanted:
        precision, provider = each.split(":")
        folder = out / f"genai-{precision}-{provider}"
        build(checkpoint, folder, precision, provider)
        if provider == "cpu":
            found = tokens(folder, answer["prompt"], len(answer["tokens"]))
            (folder / "tokens.json").write_text(json.dumps({"prompt": answer["prompt"], "tokens": found}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
