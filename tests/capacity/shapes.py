"""The shapes of three real decoders with few layers, the memory of a process that runs them, and their speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "25M": (
        "llama",
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
        | {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32000},
    ),
    "135M": (
        "llama",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        | {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152},
    ),
    "0.5B": (
        "qwen2",
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 6, "num_attention_heads": 14}
        | {"num_key_value_heads": 2, "vocab_size": 151936},
    ),
}
"""Model type and config by size; 0.5B has 6 of its 24 layers."""
COMMON = {"max_position_embeddings": 2048, "tie_word_embeddings": True}
RUN = """
import json, sys, time
import partita
from partita import process
from partita.process import peak_rss_bytes
process.own_process = True
package, prompt, new, rows = sys.argv[1], *map(int, sys.argv[2:])
model = partita.load(package, providers="cpu", observe=False, process="this")
texts = [[1 + (at * 7919) % 20000 for at in range(prompt)]] * rows
generation = model.generate(texts, max_new_tokens=new, stop_token_ids=())
times = [time.perf_counter()]
for step in generation:
    times.append(time.perf_counter())
steps = [after - before for before, after in zip(times[1:], times[2:])]
print(json.dumps({"peak": peak_rss_bytes(), "step": min(steps), "median": sorted(steps)[len(steps) // 2]}))
"""


def run_package(package: Path, prompt: int, new: int, rows: int = 1) -> dict[str, float]:
    """Peak memory of a generation in a process of its own, and the fastest and the median decode step in seconds."""
    command = [sys.executable, "-c", RUN, str(package), *map(str, (prompt, new, rows))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
