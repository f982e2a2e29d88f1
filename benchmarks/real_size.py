"""`python -m benchmarks.real_size [NAME…]`: trace models of real size without their weights; seconds and peak memory.

The configs are those that the models were published with. Parameters are tensors without data, so a model of any size
fits; what is measured is the export up to the point at which weights would be written. Each model gets a process of its
own, because peak memory is counted per process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from partita.options.export import Attention

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-70b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen3-235b-a22b": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
    ),
    "mixtral-8x22b": (
        "mixtral",
        {
            "vocab_size": 32768,
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_hidden_layers": 56,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 65536,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "max_position_embeddings": 163840,
        },
    ),
    "qwen3-next-80b-a3b": (
        "qwen3_next",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
        },
    ),
    "falcon-h1-34b": (
        "falcon_h1",
        {
            "vocab_size": 261120,
            "hidden_size": 5120,
            "intermediate_size": 21504,
            "num_hidden_layers": 72,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 2,
            "max_position_embeddings": 262144,
        },
    ),
}
"""Name -> model type and config. Dense, mixtures of experts, latent attention, linear attention, state space model."""
MAX_LENGTH = 4096


def measure(name: str, attention: Attention) -> dict[str, Any]:
    """Build, probe, trace and rewrite one model in bfloat16; what it took and how large it is."""
    from transformers import AutoConfig

    from partita.export.checkpoint.description import Checkpoint
    from partita.export.checkpoint.weight_files import TensorInfo
    from partita.export.drafts import Draft
    from partita.export.exporters import Work
    from partita.export.options import ExportOptions
    from partita.export.progress import Silent
    from partita.export.target import usual
    from partita.export.trace.fake_model import build_fake_model
    from partita.export.weights import external_data as weights
    from partita.process import peak_rss_bytes

    model_type, settings = CONFIGS[name]
    config = AutoConfig.for_model(model_type, **settings)
    began = time.perf_counter()
    fake = build_fake_model(config, "bfloat16", 1, MAX_LENGTH)
    built = time.perf_counter()
    stored = {
        key: TensorInfo(key, "model.safetensors", tuple(value.shape), "bfloat16")
        for key, value in fake.module.state_dict().items()
    }
    options = ExportOptions(name, Path(name), precision="bf16", max_length=MAX_LENGTH, attention=attention)
    checkpoint = Checkpoint(Path(name), name, config, "", stored, ())
    draft = Draft(Work(options, Silent(), Path(name)), checkpoint, fake, MAX_LENGTH)
    traced = draft.graphs(usual(attention)).traced_graphs
    models = [item.model for item in traced]
    return {
        "name": name,
        "attention": attention,
        "parameters": weights.parameter_count(models),
        "weight_bytes": weights.planned_bytes(models),
        "nodes": [len(list(model.graph)) for model in models],
        "states": len(traced[0].states),
        "build_seconds": built - began,
        "trace_seconds": time.perf_counter() - built,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def main() -> None:
    """Measure each model in a child process, and print a line for it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_size", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*CONFIGS, []], help=f"of {', '.join(CONFIGS)}; default: all")
    parser.add_argument("--attention", default="gqa")
    parser.add_argument("--here", action="store_true", help="in this process, as JSON: what the child process does")
    chosen = parser.parse_args()
    for name in chosen.names or CONFIGS:
        if chosen.here:
            sys.stdout.write(json.dumps(measure(name, chosen.attention)) + "\n")
            continue
        command = [sys.executable, "-m", "benchmarks.real_size", name, "--attention", chosen.attention, "--here"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stdout.write(f"{name:20} failed: {done.stderr.strip().splitlines()[-1]}\n")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        sys.stdout.write(
            f"{name:20} {found['parameters'] / 1e9:6.1f} B parameters, {found['weight_bytes'] / 1e9:7.1f} GB, "
            f"{found['nodes']} nodes, {found['states']} states: {time.perf_counter() - began:.0f} s, "
            f"{found['peak_rss_bytes'] / 1e9:.2f} GB peak\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
