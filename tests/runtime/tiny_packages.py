"""Tiny packages for the runtime tests: a random llama traced to ONNX with a static cache, and its manifest.

A stand-in for the exporter, small enough to read: it traces one model type with two lowerings and writes the same
folder layout. Needs torch; knows nothing of ONNX Runtime.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnx
import torch
import torch.onnx.ops as onnx_ops
from safetensors.numpy import save_file
from transformers import AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import AttentionInterface

from partita import package

NAME = "partita_test"
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD = 512, 64, 2, 4, 2, 16
PROMPT, DECODE = 13, 8
TRACED: dict[str, Any] = {}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
ONNX_DTYPES = {"fp32": "float32", "fp16": "float16"}
TEXT = [
    "The quick brown fox jumps over the lazy dog. Return the number of items in a list, or raise ValueError.",
    "日本語のテキスト。漢字とかなとカナ。 你好，世界！ 한국어 문장입니다.",
    "emoji: 😀 👩‍👩‍👧‍👦 🇨🇭 café naïve Straße",
]


@dataclass(frozen=True)
class Spec:
    """What to build."""

    attention: str = "gqa"
    batch: int = 1
    max_length: int = 64
    precision: str = "fp32"
    prefill_chunk: int | None = None
    """C of a fully static pair; None builds one graph with a symbolic S and K."""


class Layer(CacheLayerMixin):
    """Hands new keys and values to the attention function untouched; that one writes the cache."""

    is_compileable, is_sliding = True, False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.is_initialized, self.keys, self.values, self.room = True, keys, values, keys.shape[2]

    def update(self, key_states, value_states, *args, **kwargs):
        return key_states, value_states

    def get_seq_length(self, *args):
        return 0

    def get_max_length(self):
        return self.room

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length, *args):
        return self.room, 0

    def lazy_initialization(self, *args, **kwargs):
        pass


class StaticCache(Cache):
    """All layers of one traced forward."""

    def __init__(self, past: list[torch.Tensor]) -> None:
        self.layers = [Layer(k, v) for k, v in zip(past[0::2], past[1::2], strict=True)]
        self.layer_class_to_replicate, self.offloading = None, False

    def get_seq_length(self, *args, **kwargs):
        return 0


def attention(module, query, key, value, mask=None, scaling=None, **ignored):
    """query [B, H, S, D], key and value [B, Hkv, S, D] -> ([B, S, H, D], None)."""
    layer, past = module.layer_idx, TRACED["past"]
    past_k, past_v = past[2 * layer], past[2 * layer + 1]
    b, h, s, d = query.shape
    if TRACED["attention"] == "gqa":
        flat = [t.transpose(1, 2).reshape(b, s, -1) for t in (query, key, value)]
        out, new_k, new_v = onnx_ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (*flat, past_k, past_v, *TRACED["cursor"]),
            {"num_heads": h, "kv_num_heads": key.shape[1], "scale": float(scaling)},
            dtypes=(query.dtype,) * 3,
            shapes=((b, s, h * d), past_k.shape, past_v.shape),
            version=1,
        )
    else:
        write, valid = TRACED["cursor"]
        new_k, new_v = (
            onnx_ops.symbolic(
                "onnx::TensorScatter",
                (old, new, write),
                {"axis": 2, "mode": "linear"},
                dtype=old.dtype,
                shape=old.shape,
                version=24,
            )
            for old, new in ((past_k, key), (past_v, value))
        )
        out = onnx_ops.symbolic(
            "onnx::Attention",
            (query, new_k, new_v, None, None, None, valid),
            {"is_causal": 1, "scale": float(scaling)},
            dtype=query.dtype,
            shape=(b, h, s, d),
            version=24,
        ).transpose(1, 2)
    TRACED["present"][2 * layer], TRACED["present"][2 * layer + 1] = new_k, new_v
    return out.reshape(b, s, h, -1), None


class Wrapper(torch.nn.Module):
    """The forward that is traced."""

    def __init__(self, model: torch.nn.Module, lowering: str) -> None:
        super().__init__()
        self.model, self.lowering = model, lowering

    def forward(self, input_ids, position_ids, cursor_a, cursor_b, logits_indices, past):
        TRACED.update(attention=self.lowering, past=past, cursor=(cursor_a, cursor_b), present={})
        out = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=StaticCache(past),
            use_cache=True,
            attention_mask=None,
            logits_to_keep=logits_indices,
        )
        return (out.logits, *(TRACED["present"][i] for i in range(len(past))))


def reference_model() -> LlamaForCausalLM:
    """The model every package is made of, fp32, eager attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()


def greedy_reference(prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens after `prompt`, by transformers' generate; the end token does not end it."""
    ids, model = torch.tensor([list(prompt)]), cast(Any, reference_model())
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


def cursor_ports(lowering: str, batch: int) -> tuple[package.Port, package.Port]:
    """The two inputs that tell the lowering where the cache stands."""
    if lowering == "gqa":
        return (
            package.Port(name="seqlens_k", role="last_index", shape=(batch,), dtype="int32"),
            package.Port(name="total_sequence_length", role="total_length", shape=(), dtype="int32"),
        )
    return (
        package.Port(name="write_indices", role="write_start", shape=(batch,), dtype="int64"),
        package.Port(name="nonpad_kv_seqlen", role="valid_length", shape=(batch,), dtype="int64"),
    )


def trace(
    folder: Path, file: str, phase: Literal["any", "prefill", "decode"], spec: Spec, length: int | None
) -> package.GraphFile:
    """Trace one graph into `folder/file`; `length` fixes S (and K = 1), None leaves both symbolic."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    model = cast(Any, reference_model()).to(DTYPES[spec.precision])
    model.set_attn_implementation(NAME)
    shape = (spec.batch, KV_HEADS, spec.max_length, HEAD)
    past = [torch.zeros(shape, dtype=DTYPES[spec.precision]) for _ in range(2 * LAYERS)]
    cursor = cursor_ports(spec.attention, spec.batch)
    states = state_records(spec)
    names = ["input_ids", "position_ids", *(p.name for p in cursor), "logits_indices", *(s.past for s in states)]
    outs = ["logits", *(s.present for s in states)]
    s = length or 3
    start = torch.zeros(spec.batch, dtype=torch.int64)
    values = {
        "last_index": (start + s - 1).int(),
        "total_length": torch.tensor(s, dtype=torch.int32),
        "write_start": start,
        "valid_length": start + s,
    }
    args = (
        torch.ones(spec.batch, s, dtype=torch.int64),
        torch.arange(s).repeat(spec.batch, 1),
        *(values[p.role] for p in cursor),
        torch.arange(1 if length else 2),
        past,
    )
    dims = {
        "s": torch.export.Dim("s", min=1, max=spec.max_length),
        "k": torch.export.Dim("k", min=1, max=spec.max_length),
    }
    dynamic = (
        None
        if length
        else {
            "input_ids": {1: dims["s"]},
            "position_ids": {1: dims["s"]},
            "cursor_a": {},
            "cursor_b": {},
            "logits_indices": {0: dims["k"]},
            "past": [{}] * len(past),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Wrapper(model, spec.attention),
            args,
            dynamo=True,
            opset_version=21 if spec.attention == "gqa" else 24,
            dynamic_shapes=dynamic,
            input_names=names,
            output_names=outs,
            verbose=False,
        )
    assert program is not None
    for node in program.model.graph:
        node.domain = "" if node.domain == "onnx" else node.domain
        name_by_module(node)
    program.model.opset_imports.pop("onnx", None)
    if spec.attention == "gqa":
        program.model.opset_imports["com.microsoft"] = 1
    program.save(str(folder / file), external_data=True)
    sequence: package.Dimension = length or "s"
    rows: package.Dimension = 1 if length else "k"
    inputs = (
        package.Port(name="input_ids", role="tokens", shape=(spec.batch, sequence), dtype="int64"),
        package.Port(name="position_ids", role="positions", shape=(spec.batch, sequence), dtype="int64"),
        *cursor,
        package.Port(name="logits_indices", role="logits_rows", shape=(rows,), dtype="int64"),
    )
    dtype = ONNX_DTYPES[spec.precision]
    output = package.Port(name="logits", role="logits", shape=(spec.batch, rows, VOCAB), dtype=dtype)
    return package.GraphFile(
        file=file,
        phase=phase,
        sequence_length=length,
        nodes=len(list(program.model.graph)),
        inputs=inputs,
        outputs=(output,),
    )


def name_by_module(node: Any) -> None:
    """Name a node after its module, as the exporter does: model.layers.0.mlp/MatMul_12."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    names = [part.strip(" '\"") for part in scopes.strip("[]").split(",")]
    module = names[-2] if len(names) > 1 else ""
    node.name = f"{module.removeprefix('model.')}/{node.name}" if module else node.name


def state_records(spec: Spec) -> tuple[package.State, ...]:
    """Key and value of every layer."""
    return tuple(
        package.State(
            past=f"past_key_values.{layer}.{kind}",
            present=f"present.{layer}.{kind}",
            layer=layer,
            kind=kind,
            shape=(spec.batch, KV_HEADS, spec.max_length, HEAD),
            dtype=ONNX_DTYPES[spec.precision],
        )
        for layer in range(LAYERS)
        for kind in ("key", "value")
    )


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer over every byte, so that any text and any multi-byte character can be written."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT[:1] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
    )
    fast.save_pretrained(folder)


def write_known_answer(folder: Path) -> None:
    """Reference logits for a fixed prompt and DECODE greedy tokens, from the eager fp32 model."""
    model = reference_model()
    prompt = torch.randint(3, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    ids, tokens, rows = prompt, [], []
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
        prefill = logits
        for _ in range(DECODE):
            tokens.append(int(logits[-1].argmax()))
            ids = torch.cat([ids, torch.tensor([[tokens[-1]]])], dim=1)
            logits = model(input_ids=ids).logits[0]
            rows.append(logits[-1])
    save_file(
        {
            "prompt": prompt[0].numpy(),
            "tokens": np.array(tokens, dtype=np.int64),
            "prefill_logits": prefill.numpy(),
            "decode_logits": torch.stack(rows).numpy(),
        },
        folder / package.KNOWN_ANSWER,
        metadata={"reference": "transformers llama, eager attention, float32"},
    )


def build(folder: Path, spec: Spec) -> Path:
    """Write a whole package into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    if spec.prefill_chunk is None:
        files: tuple[package.GraphFile, ...] = (trace(folder, "model.onnx", "any", spec, None),)
    else:
        files = (
            trace(folder, "prefill.onnx", "prefill", spec, spec.prefill_chunk),
            trace(folder, "decode.onnx", "decode", spec, 1),
        )
    reference_model().config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    write_tokenizer(folder)
    write_known_answer(folder)
    seal(folder, spec, files)
    return folder


def seal(folder: Path, spec: Spec, files: tuple[package.GraphFile, ...]) -> None:
    """Write the manifest over everything that lies in `folder`."""
    model = onnx.load(folder / files[0].file, load_external_data=False)
    states = state_records(spec)
    cell = 4 if spec.precision == "fp32" else 2
    graph = package.Graph(
        files=files,
        states=states,
        opsets={i.domain: i.version for i in model.opset_import},
        attention=spec.attention,
        precision=spec.precision,
        batch_size=spec.batch,
        max_length=spec.max_length,
        vocab_size=VOCAB,
        weight_bytes=sum(f.stat().st_size for f in folder.glob("*.data")),
        cache_bytes=sum(cell * int(np.prod(s.shape)) for s in states),
    )
    names = sorted(f.name for f in folder.iterdir() if f.name != package.MANIFEST)
    package.write_manifest(
        folder,
        package.Manifest(
            created="2026-01-01T00:00:00Z",
            source=package.Source(
                checkpoint="tiny",
                model_type="llama",
                architecture="LlamaForCausalLM",
                dtype="float32",
                parameters=0,
                files=(),
            ),
            graph=graph,
            files=tuple(package.record_file(folder, n) for n in names),
            toolchain={"onnx": onnx.__version__},
            verification=package.Verification(status="unverified", detail="made by the tests"),
        ),
    )
