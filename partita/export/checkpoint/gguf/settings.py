"""What becomes of the settings of a GGUF file: transformers reads most of them into a config, others are put there,
and those are refused without which the model would compute something else.

The original that a package is compared with is built from the same config, so that no comparison can tell what is
missing in it. A setting that nothing here knows is therefore refused by name. What is written for each architecture is
in llama.cpp's `conversion/`, what is made of it in its `llama-model.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import modeling_gguf_pytorch_utils

from partita.errors import UnsupportedModelError
from partita.export.checkpoint.gguf.header import Header
from partita.export.checkpoint.weight_files import few
from partita.package.contract import CONTEXT_LENGTHS

SIZES = {
    "attention.key_length": "head_dim",
    "attention.key_length_swa": "head_dim",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Sizes that transformers does not read of every architecture, and what its configs call them."""
ROTATED = {"rope.dimension_count": "full_attention", "rope.dimension_count_swa": "sliding_attention"}
"""How many numbers of a head are rotated, and in which layers, where these differ: compared with the config."""
OF_THE_FILE = frozenset(
    {
        "vocab_size",
        "attention.value_length",
        "attention.value_length_swa",
        "attention.head_count_kv",
        "feed_forward_length",
        "use_parallel_residual",
        *SIZES,
        *ROTATED,
    }
)
"""Settings that follow from the tensors and their shapes, where transformers does not read them."""
NOTHING = ("", "none", 0, 0.0, False, ())
"""Values by which a setting says nothing."""
USUAL = {"attention.causal": (True,), "expert_gating_func": (0, 1)}
"""The same of settings that say what is so without them: 1 is a softmax, as these architectures have it."""
COPIED = {
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "context_length": CONTEXT_LENGTHS,
    "expert_weights_norm": ("norm_topk_prob",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
"""Settings that are put into a config which has a place for them, the first of these."""
BASES = {
    "rope.freq_base": "full_attention",
    "rope.global.freq_base": "full_attention",
    "rope.freq_base_swa": "sliding_attention",
    "rope.local.freq_base": "sliding_attention",
}
"""Bases of the rotary embedding, and in which layers, where these differ. Two are Ollama's names."""
PATTERN = "attention.sliding_window_pattern"
"""Whether each layer has a window, or every how many layers one has none: compared with the config."""
HARMLESS = frozenset(
    {
        "attention.layer_norm_epsilon",  # of a kind of norm that the model has none of, where it has no place
        "attention.layer_norm_rms_epsilon",
        "classifier.output_labels",
        "context_length",  # where a model has no limit
        "decoder_block_count",  # encoder-decoders are refused as such
        "embedding_length_out",
        "features_length",
        "pooling_type",
        "tensor_data_layout",
    }
)
"""Settings without which the logits are the same: a note names them."""
TOKENIZER = "tokenizer."
END_TOKENS = tuple(f"{TOKENIZER}ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
"""Settings of the tokens that end a generation."""
ORIGINAL_LENGTH = "rope.scaling.original_context_length"
"""What the lengths of texts are measured by for scaling: of every phi3, also where nothing is scaled."""
LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 B, by which llama.cpp knows them."""
INSTEAD = "export the checkpoint that it was made of"


def mapped_as(architecture: str) -> str:
    """What transformers calls an architecture in its tables of GGUF files."""
    names = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
    return names.get(architecture, architecture)


def completed(header: Header, raw: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`raw`, the config that transformers makes of a file, with what it does not read of the settings; and a note on
    settings that are left out.

    Raises UnsupportedModelError for those without which the model computes something else.
    """
    prefix = f"{header.architecture}."
    given = {name.removeprefix(prefix): value for name, value in header.settings.items() if name.startswith(prefix)}
    tables: Any = modeling_gguf_pytorch_utils.GGUF_TO_TRANSFORMERS_MAPPING
    known: Mapping[str, str | None] = tables["config"].get(mapped_as(header.architecture), {})
    read = {name for name, key in known.items() if key is not None}  # None: it goes over them
    read -= {"context_length"}  # read of gpt2 as n_ctx, which its config does not use
    made = {**raw, **_sizes(given, read, raw)}
    left = {
        name: value
        for name, value in given.items()
        if name not in read | OF_THE_FILE and value not in USUAL.get(name, NOTHING)
    }
    _check_scaling(header, left)
    for name in list(left):
        put = _put(made, name, left[name])
        if put is not None:
            made |= put
            del left[name]
    made |= _attention_scale(header, made) | _ends(header, raw)
    _check_rotated(header, given, made)
    if wrong := sorted(set(left) - HARMLESS):
        raise UnsupportedModelError(
            f"{header.path}: it says {few([_shown(name, left[name]) for name in wrong])}, which transformers' reader "
            f"of {header.architecture} leaves out, and the model would not be the same without; {INSTEAD}"
        )
    read = {f"{TOKENIZER}{name}" for part in ("", "_config") for name in tables[f"tokenizer{part}"]["tokenizer"]}
    left |= {name: value for name, value in header.settings.items() if name.startswith(TOKENIZER)}
    unread = sorted(name for name in left.keys() - read.union(END_TOKENS) if left[name] not in NOTHING)
    note = f"settings of the GGUF file that transformers does not read: {few(unread)}"
    return made, (note,) if unread else ()


def _ends(header: Header, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that end a generation in llama.cpp: those of the settings, and those that are known by their text."""
    said = [header.settings[name] for name in END_TOKENS if isinstance(header.settings.get(name), int)]
    own = raw.get("eos_token_id")
    if isinstance(own, list):  # transformers knows all of some types
        said += own
    elif own is not None and END_TOKENS[0] not in header.settings:
        said.append(own)
    found = list(dict.fromkeys((*said, *header.ends)))
    return {"eos_token_id": found if len(found) > 1 else found[0]} if found else {}


def _sizes(given: Mapping[str, Any], read: set[str], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes in the file that transformers does not read, as settings of its config."""
    return {
        key: given[name]
        for name, key in SIZES.items()
        if key in raw and name not in read and isinstance(given.get(name), int)
    }


def _check_scaling(header: Header, left: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for a rotary embedding that is scaled; takes out what says nothing without it."""
    scaled = sorted(name for name in left if name.startswith(("rope.scaling.", "rope.scale")))
    if scaled == [ORIGINAL_LENGTH] and not any(name.startswith("rope_factors") for name in header.tensors):
        del left[ORIGINAL_LENGTH]
    elif scaled:
        raise UnsupportedModelError(
            f"{header.path}: its rotary embedding is scaled ({few([_shown(name, left[name]) for name in scaled])}), "
            f"which transformers' reader of {header.architecture} leaves out; {INSTEAD}"
        )


def _put(raw: Mapping[str, Any], name: str, value: Any) -> dict[str, Any] | None:
    """What a setting changes in a config; None where that has no place for it."""
    if name == PATTERN:
        return {} if _is_pattern(raw, value) else None
    if not isinstance(value, int | float):
        return None
    if name in BASES:
        return _with_base(raw, BASES[name], value)
    if name == "attention.sliding_window" and raw.get("use_sliding_window") is False:
        return None  # with it, a config forgets the window
    key = next((key for key in COPIED.get(name, ()) if key in raw), None)
    return None if key is None else {key: value}


def _is_pattern(raw: Mapping[str, Any], value: Any) -> bool:
    """Whether a config has windows in the layers that the file says."""
    layers = raw.get("layer_types")
    if not isinstance(layers, list):
        return False
    if isinstance(value, int):
        value = [bool((layer + 1) % value) for layer in range(len(layers))]
    return isinstance(value, list | tuple) and layers == [
        "sliding_attention" if windowed else "full_attention" for windowed in value
    ]


def _rope(raw: Mapping[str, Any], layers: str) -> Mapping[str, Any] | None:
    """The settings of the rotary embedding in some layers; None where the config has none of their own."""
    rope = raw.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return None
    nested = [rope.get(key) for key in ("full_attention", "sliding_attention")]
    if any(isinstance(each, Mapping) for each in nested):
        found = rope.get(layers)
        return found if isinstance(found, Mapping) else None
    return rope if layers == "full_attention" else None


def _with_base(raw: Mapping[str, Any], layers: str, value: float) -> dict[str, Any] | None:
    """The settings of the rotary embedding with another base in some layers."""
    rope = _rope(raw, layers)
    if rope is None:
        return None
    whole, changed = raw["rope_parameters"], {**rope, "rope_theta": value}
    return {"rope_parameters": changed if rope is whole else {**whole, layers: changed}}


def _attention_scale(header: Header, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the queries of a gemma are divided by the root of, which no file says: the numbers of a head, and in the
    largest models the width of the model by heads.
    """
    if header.architecture not in LARGEST or "query_pre_attn_scalar" not in raw:
        return {}
    largest = raw.get("num_hidden_layers") == LARGEST[header.architecture]
    size = _head({**raw, "head_dim": None} if largest else raw)
    return {} if size is None else {"query_pre_attn_scalar": size}


def _head(raw: Mapping[str, Any]) -> int | None:
    """How many numbers a head has; None where the config does not say, which is found by others."""
    head, hidden, heads = (raw.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(head, int) and head > 0:
        return head
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def _check_rotated(header: Header, given: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError where the config rotates more or fewer numbers of a head than the file says."""
    for name, layers in ROTATED.items():
        said, rope, head = given.get(name), _rope(raw, layers), _head(raw)
        if not isinstance(said, int) or not said or rope is None or head is None:
            continue
        if rope.get("rope_type", "default") != "default":
            continue  # "proportional" rotates all of a head, some of it by nothing
        rotated = int(head * (rope.get("partial_rotary_factor") or 1.0))
        if said != rotated:
            raise UnsupportedModelError(
                f"{header.path}: {name} is {said:,}, and the model that transformers makes of it rotates {rotated:,} "
                f"numbers of each head; {INSTEAD}"
            )


def _shown(name: str, value: Any) -> str:
    """A setting and its value, in a message."""
    return f"{name} = {'an array' if value is None or isinstance(value, tuple) else value}"
