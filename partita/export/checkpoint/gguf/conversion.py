"""Open a GGUF file as a checkpoint folder, with config and tokenizer in transformers' formats.

The folder is temporary, contains a link to the file, and lasts as long as the checkpoint object.

The config that transformers reads from the file is completed. The source model of the comparison is built from the same
config, so that verification cannot detect a missing setting. Therefore unknown settings are refused by name. Settings
are written by llama.cpp's `conversion/` and read by its `llama-model.cpp`.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, modeling_gguf_pytorch_utils

from partita.errors import PartitaError, UnsupportedModelError
from partita.export.checkpoint.gguf import MAGIC, Header, dequantised, read_header
from partita.export.checkpoint.gguf.weights import FACTORS, mapped, weights_of
from partita.export.checkpoint.stored_formats import QuantisedTensors, StoredFloats
from partita.export.checkpoint.weight_files import LAYOUTS, few
from partita.export.trace.fake_model import quiet, translate_errors
from partita.package.contract import CONTEXT_LENGTHS

SUFFIX = ".gguf"
TRANSFORMERS: Any = modeling_gguf_pytorch_utils
SPLITS_AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo")
"""Names of common pre-tokenizers that split text as GPT-2 does, which transformers assumes for unknown names."""


def gguf_file(given: Path) -> Path | None:
    """The GGUF file at `given`, or the only weights there, or None. Raises UnsupportedModelError for several."""
    if given.is_file():
        with given.open("rb") as stream:
            return given if given.suffix == SUFFIX or stream.read(len(MAGIC)) == MAGIC else None
    if not given.is_dir() or any((given / name).is_file() for layout in LAYOUTS for name in layout):
        return None
    files = sorted(given.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise UnsupportedModelError(
            f"{given}: {len(files)} GGUF files and no other weights: {few([path.name for path in files])}; give one of "
            "them"
        )
    return files[0] if files else None


def prepare(path: Path) -> tuple[Header, Path, tuple[str, ...]]:
    """Write config and tokenizer of a GGUF file into a temporary folder, which is removed with the header or at exit.

    Returns header, folder and notes. Raises as `read_header` does.
    """
    import gguf  # noqa: F401 - an ImportError names the extra to install

    header = read_header(path)
    known = TRANSFORMERS.GGUF_SUPPORTED_ARCHITECTURES
    if mapped_as(header.architecture) not in known:
        raise UnsupportedModelError(
            f"{path}: transformers cannot read GGUF files of architecture {header.architecture[:80]}; it "
            f"reads {', '.join(sorted(known))}; export the checkpoint that the file was converted from"
        )
    folder = Path(tempfile.mkdtemp(prefix="partita-gguf-"))
    weakref.finalize(header, shutil.rmtree, folder, ignore_errors=True)
    (folder / path.name).symlink_to(path.resolve())
    with quiet(), translate_errors(f"{path}: reading the config of {header.architecture}"):
        config = AutoConfig.from_pretrained(str(folder), gguf_file=path.name, local_files_only=True)
        raw = config.to_dict()
    raw = _completed(header, raw)
    if FACTORS in header.tensors:
        raw |= _with_factors(header, raw)
    (folder / "config.json").write_text(json.dumps(raw, default=str), encoding="utf-8")
    return header, folder, _tokenizer(header, folder, path.name)


def read(header: Header, config: PreTrainedConfig) -> QuantisedTensors:
    """The weights of a GGUF file as a quantised checkpoint. Raises as `weights_of` does."""
    with quiet(), translate_errors(f"{header.path}: finding its tensors in the model"):
        weights = weights_of(header, config)
    packed = {name: weight for name, weight in weights.items() if not isinstance(weight, StoredFloats)}
    tensors = {name: weight.info for name, weight in weights.items()}
    counts: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.type.name] += math.prod(tensor.shape)
    return QuantisedTensors(f"GGUF {', '.join(name for name, _ in counts.most_common())}", tensors, packed)


def _with_factors(header: Header, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rotary embedding with the frequency factors of the file, the same at every length."""
    tensor = header.tensors[FACTORS]
    factors = dequantised(mapped(tensor), tensor.type.number).reshape(-1).astype(float).tolist()
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise UnsupportedModelError(f"{header.path}: {FACTORS} and a rotary embedding of another type")
    most = raw.get("max_position_embeddings")
    # transformers has factors for longrope only; with both equal, and attention_factor 1, it computes as llama.cpp
    changed = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return {"rope_parameters": {**rope, **changed, "factor": 1.0, "original_max_position_embeddings": most}}


def _tokenizer(header: Header, folder: Path, file: str) -> tuple[str, ...]:
    """Write the tokenizer of the file into `folder`. Returns a note where transformers cannot load it or differs."""
    try:
        with quiet(), translate_errors("reading the tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file, local_files_only=True)
            tokenizer.save_pretrained(str(folder))
    except PartitaError as error:
        return (f"transformers cannot build a tokenizer from the GGUF file: {error.message[:200]}",)
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split, known = header.settings.get("tokenizer.ggml.pre"), {*SPLITS_AS_GPT2, *GGUF_PRE_TOKENIZER_SPLITS}
    if header.settings.get("tokenizer.ggml.model") != "gpt2" or split in known:
        return ()
    return (
        f"the GGUF file names the pre-tokenizer {str(split)[:40]!r} (tokenizer.ggml.pre), but transformers splits text "
        f"as GPT-2 does: texts may get other tokens than in training; pass token ids, or {ALTERNATIVE}",
    )


SIZES = {
    "attention.key_length": "head_dim",
    "attention.key_length_swa": "head_dim",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Sizes that transformers does not read for every architecture -> config keys."""
ROTATED = {"rope.dimension_count": "full_attention", "rope.dimension_count_swa": "sliding_attention"}
"""Numbers of rotated dimensions per head, and the layer type where these differ; compared with the config."""
OF_THE_FILE = frozenset(
    (
        *("vocab_size", "attention.value_length", "attention.value_length_swa", "attention.head_count_kv"),
        *("feed_forward_length", "use_parallel_residual", *SIZES, *ROTATED),
    )
)
"""Settings that follow from the tensors and their shapes, where transformers does not read them."""
UNSET = ("", "none", 0, 0.0, False, ())
"""Values that set nothing."""
USUAL = {"attention.causal": (True,), "expert_gating_func": (0, 1)}
"""Values equal to the default; 1 is a softmax."""
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
"""Settings -> config keys; the first that the config has is set."""
BASES = {"rope.freq_base": "full_attention", "rope.freq_base_swa": "sliding_attention"}
"""Bases of the rotary embedding, and the layer type where these differ."""
PATTERN = "attention.sliding_window_pattern"
"""Per layer, whether it has a window, or the period of layers without one; compared with the config."""
HARMLESS = frozenset(
    (
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),  # of a norm that the model does not have
        *("context_length", "decoder_block_count", "embedding_length_out", "features_length"),
        *("classifier.output_labels", "pooling_type", "tensor_data_layout"),
    )
)
"""Settings that do not change the logits where the config has no key for them."""
END_TOKENS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
"""Settings with end-of-generation tokens."""
ORIGINAL_LENGTH = "rope.scaling.original_context_length"
"""The reference length for scaling; every phi3 has it, scaled or not."""
LARGEST = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27 B models, by which llama.cpp detects them."""
ALTERNATIVE = "export the checkpoint that the file was converted from"


def mapped_as(architecture: str) -> str:
    """transformers' name of an architecture in its GGUF tables."""
    names = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
    return names.get(architecture, architecture)


def _completed(header: Header, raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with the settings that transformers does not read. Raises UnsupportedModelError."""
    prefix = f"{header.architecture}."
    given = {name.removeprefix(prefix): value for name, value in header.settings.items() if name.startswith(prefix)}
    known = TRANSFORMERS.GGUF_TO_TRANSFORMERS_MAPPING["config"].get(mapped_as(header.architecture), {})
    read = {name for name, key in known.items() if key is not None}  # None: transformers ignores it
    read -= {"context_length"}  # read for gpt2 as n_ctx, which its config does not use
    sizes = {key: given[name] for name, key in SIZES.items() if name not in read and isinstance(given.get(name), int)}
    made = {key: sizes.get(key, value) for key, value in raw.items()}
    unread = {
        name: value
        for name, value in given.items()
        if name not in read | OF_THE_FILE and value not in USUAL.get(name, UNSET)
    }
    scaled = [name for name in unread if name.startswith("rope.scal")]
    if scaled == [ORIGINAL_LENGTH] and not any(name.startswith("rope_factors") for name in header.tensors):
        del unread[ORIGINAL_LENGTH]
    wrong = []
    for name, value in unread.items():
        change = _config_change(made, name, value)
        if change is not None:
            made |= change
        elif name not in HARMLESS:
            wrong.append(f"{name} = {'an array' if isinstance(value, tuple) else value}")
    if wrong:
        raise UnsupportedModelError(
            f"{header.path}: it has {few(sorted(wrong))}, which transformers' reader of {header.architecture} ignores, "
            f"but which change the outputs of the model; {ALTERNATIVE}"
        )
    made |= _attention_scale(header, made) | _ends(header, raw)
    _check_rotated(header, given, made)
    return made


def _ends(header: Header, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The end-of-generation tokens of llama.cpp: those of the settings, and those known by their text."""
    ids = [header.settings[name] for name in END_TOKENS if isinstance(header.settings.get(name), int)]
    own = raw.get("eos_token_id")
    if isinstance(own, list):  # transformers knows all of some architectures
        ids += own
    elif own is not None and END_TOKENS[0] not in header.settings:
        ids.append(own)
    found = list(dict.fromkeys((*ids, *header.ends())))
    return {"eos_token_id": found if len(found) > 1 else found[0]} if found else {}


def _config_change(raw: Mapping[str, Any], name: str, value: Any) -> dict[str, Any] | None:
    """The config change that a setting requires; None where the config has no key for it."""
    if name == PATTERN:
        layers = raw.get("layer_types") or ()
        if isinstance(value, int):
            value = tuple(bool((layer + 1) % value) for layer in range(len(layers)))
        windowed = {"sliding_attention": True, "full_attention": False}
        return {} if layers and value == tuple(windowed.get(each) for each in layers) else None
    if not isinstance(value, int | float):
        return None
    if name in BASES:
        rope, whole = _rope(raw, BASES[name]), raw.get("rope_parameters")
        if rope is None or whole is None:
            return None
        changed = {**rope, "rope_theta": value}
        return {"rope_parameters": changed if rope is whole else {**whole, BASES[name]: changed}}
    if name == "attention.sliding_window" and raw.get("use_sliding_window") is False:
        return None  # a config without a layer pattern ignores the window
    key = next((key for key in COPIED.get(name, ()) if key in raw), None)
    return None if key is None else {key: value}


def _rope(raw: Mapping[str, Any], layers: str) -> Mapping[str, Any] | None:
    """The rotary settings of some layers; None where the config has none."""
    rope = raw.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return None
    nested = any(isinstance(rope.get(key), Mapping) for key in ("full_attention", "sliding_attention"))
    found = rope.get(layers) if nested else rope if layers == "full_attention" else None
    return found if isinstance(found, Mapping) else None


def _attention_scale(header: Header, raw: Mapping[str, Any]) -> dict[str, Any]:
    """query_pre_attn_scalar of gemma, which is not in the file."""
    if header.architecture not in LARGEST or "query_pre_attn_scalar" not in raw:
        return {}
    largest = raw.get("num_hidden_layers") == LARGEST[header.architecture]
    size = _head({**raw, "head_dim": None} if largest else raw)
    return {} if size is None else {"query_pre_attn_scalar": size}


def _head(raw: Mapping[str, Any]) -> int | None:
    """The head size; None where the config does not contain it."""
    head, hidden, heads = (raw.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(head, int) and head > 0:
        return head
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def _check_rotated(header: Header, given: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError where config and file differ in the number of rotated dimensions per head."""
    for name, layers in ROTATED.items():
        value, rope, head = given.get(name), _rope(raw, layers), _head(raw)
        if not isinstance(value, int) or not value or rope is None or head is None:
            continue
        if rope.get("rope_type", "default") != "default":
            continue  # "proportional" rotates the whole head, some dimensions by an angle of 0
        rotated = int(head * (rope.get("partial_rotary_factor") or 1.0))
        if value != rotated:
            raise UnsupportedModelError(
                f"{header.path}: {name} is {value:,}, but transformers' model rotates {rotated:,} numbers "
                f"of each head; {ALTERNATIVE}"
            )
