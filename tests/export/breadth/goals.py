"""What a full run has to show: how many types are verified, and which must be among them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.export.breadth.records import BAD, Outcome

LEAST = {"gqa": 85, "onnx24": 60, "primitives": 60}
"""Verified types by lowering."""

_NAMED = """
    llama qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text mistral ministral3 mixtral gemma gemma2
    gemma3_text gemma4_text phi phi3 phimoe gpt2 gpt_neox gpt_oss opt bloom falcon mpt starcoder2 olmo2 olmoe
    cohere2 granite granitemoehybrid deepseek_v2 deepseek_v3 glm4 glm4_moe stablelm smollm3 lfm2 jamba bamba
    falcon_h1 mamba2 ernie4_5 exaone4 nemotron helium minicpm3 llama4_text llava llava_next llava_onevision
    qwen2_vl qwen2_5_vl qwen3_vl mistral3 smolvlm idefics3 internvl glm4v aya_vision gemma3 voxtral qwen2_audio
    phi4_multimodal
"""
NAMED = _NAMED.split()
"""Families that are verified with gqa."""


def complaints(outcomes: Sequence[Outcome]) -> list[str]:
    """What is not as it has to be after a full run, a line each; empty when all is well."""
    lines = [
        f"{entry.model_type} with {entry.attention}: {entry.status}: {entry.reason}"
        for entry in outcomes
        if entry.status in BAD
    ]
    verified = {
        name: {e.model_type for e in outcomes if e.attention == name and e.status == "verified"} for name in LEAST
    }
    for name, least in LEAST.items():
        if len(verified[name]) < least:
            lines.append(f"{len(verified[name])} types are verified with {name}, at least {least} have to be")
    absent = [name for name in NAMED if name not in verified["gqa"]]
    if absent:
        lines.append(f"not verified with gqa: {', '.join(absent)}")
    return lines
