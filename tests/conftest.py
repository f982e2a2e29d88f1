"""Shared fixtures: tiny random checkpoints of any model type, and the policy for components that are missing.

Nothing heavy is imported until a test asks for it: torch and transformers are imported inside the functions.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from partita import process
from partita.commands import terminal
from tests import traces
from tests.checkpoints import save_random_model

pytest_plugins = ["tests.environments"]
process.own_process = True  # tests read ONNX Runtime's log
terminal.LONG_STAGE_SECONDS = math.inf  # what is on stderr does not depend on the speed of the machine

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO_CHECKPOINT = REPOSITORY / "partita" / "demo" / "checkpoint"

# Large enough for prompts beyond every window below, small enough for 20 ms a forward pass.
BASE: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# What makes each architecture itself: small windows so that a short prompt leaves them, multipliers that are not 1,
# enough layers that every kind of layer occurs.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.5,
    },
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases out of which others are a sample, unless PARTITA_HEAVY=1 asks for them."""
    if os.environ.get("PARTITA_HEAVY") == "1":
        return
    omitted = [item for item in items if item.get_closest_marker("heavy")]
    if omitted:
        config.hook.pytest_deselected(items=omitted)
        items[:] = [item for item in items if not item.get_closest_marker("heavy")]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Programs that tests start can be ended with Ctrl-C, also where this session is in the background: a shell lets
    what runs there ignore it, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(200_000)  # as the command line does


def pytest_collection_finish(session: pytest.Session) -> None:
    """The tests themselves and what they imported stay to the end: collections need not look at them."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exports of the same tiny model share its trace."""
    traces.share(item)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A KeyboardInterrupt that nobody pressed is a failure of its test, and does not end the run."""
    pressed: list[int] = []
    handler = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: Any) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, press)
    try:
        return (yield)
    except KeyboardInterrupt as error:
        if pressed:
            raise
        raise AssertionError("the test let a KeyboardInterrupt through") from error
    finally:
        if handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)


@pytest.fixture
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit on the size of files Python leaves compiled modules cut off behind, and reads them later."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what is remembered of experiments, and builds for dry runs, out of the user's cache folder.

    An environment variable, so that child processes write there too; the pytest of another environment loads this file
    as well and has a folder of its own.
    """
    folder = tmp_path_factory.mktemp("cache-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTITA_CACHE_DIR", str(folder))
        yield folder


def require(component: str, available: bool | None = None) -> None:
    """Skip the test when `component` is missing, or fail it when PARTITA_REQUIRE_ALL=1, as in CI.

    `component` is the name of a module unless `available` says whether it is there.
    """
    if available is None:
        available = importlib.util.find_spec(component) is not None
    if available:
        return
    reason = f"missing component: {component}"
    if os.environ.get("PARTITA_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason} (PARTITA_REQUIRE_ALL=1 allows no skips)", pytrace=False)
    pytest.skip(reason)


def require_dry_run() -> None:
    """What the dry run of CUDA needs: Linux on x86-64, a C compiler, pyelftools, and the CUDA provider's library."""
    require("Linux on x86-64", sys.platform == "linux" and platform.machine() == "x86_64")
    require("a C compiler", any(shutil.which(name) for name in ("cc", "gcc", "clang")))
    require("elftools")
    spec = importlib.util.find_spec("onnxruntime")
    folder = Path(spec.origin or "").parent / "capi" if spec else Path()
    require("the CUDA provider of onnxruntime-gpu", (folder / "libonnxruntime_providers_cuda.so").is_file())


@pytest.fixture
def stand_ins(own_cache: Path) -> Path:
    """What a dry run of CUDA needs; the stubs are built once for all tests. Gives the folder that holds them."""
    require_dry_run()
    return own_cache / "cuda-dry-run"


TinyCheckpoint = Callable[..., Path]
"""What the fixture `tiny_checkpoint` gives."""


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Factory of tiny random checkpoints of any model type, made once per argument list; never write into a folder.

    Types in MODELS get the settings that make them interesting. `shards`: the number of safetensors files; `tied` sets
    tie_word_embeddings; `overrides` go into the config.
    """
    made: dict[str, Path] = {}

    def factory(
        model_type: str,
        *,
        shards: int = 1,
        dtype: str = "float32",
        tied: bool | None = None,
        tokenizer: bool = True,
        seed: int = 0,
        **overrides: Any,
    ) -> Path:
        settings = {**BASE, **MODELS.get(model_type, {}), **overrides}
        if tied is not None:
            settings["tie_word_embeddings"] = tied
        key = json.dumps([model_type, shards, dtype, tokenizer, seed, settings], sort_keys=True, default=str)
        if key not in made:
            require("torch")
            folder = tmp_path_factory.mktemp(f"tiny-{model_type}-")
            save_random_model(folder, model_type, settings, dtype, seed)
            if shards > 1:
                _split_weights(folder, shards)
            if tokenizer:
                _save_tokenizer(folder, settings["vocab_size"])
            made[key] = folder
        return made[key]

    return factory


@pytest.fixture(scope="session")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    """A package of the tiny llama in its default lowering; never write into it."""
    return exported(tiny_checkpoint("llama"))


@pytest.fixture
def own_copy(tmp_path: Path) -> Callable[[Path], Path]:
    """Copy a folder into this test's own temporary folder, for tests that damage what they are given."""

    def copy(folder: Path) -> Path:
        return shutil.copytree(folder, tmp_path / folder.name)

    return copy


def _split_weights(folder: Path, shards: int) -> None:
    """Replace model.safetensors by `shards` files and their index, tensors dealt out in turn."""
    from safetensors.torch import load_file, save_file

    single = folder / "model.safetensors"
    tensors = load_file(single)
    if len(tensors) < shards:
        raise ValueError(f"{len(tensors)} tensors cannot fill {shards} shards")
    names = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    weight_map = {key: names[position % shards] for position, key in enumerate(sorted(tensors))}
    for name in names:
        part = {key: tensors[key] for key, where in weight_map.items() if where == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    single.unlink()


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer: 3 special tokens, all 256 bytes, merges up to `vocab_size`, at least 259."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["return the value of the given item in the other list"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)


Exported = Callable[..., Path]
"""What the fixture `exported` gives."""


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Factory of verified packages of a checkpoint, made once per argument list; never write into a folder.

    `options` are those of `ExportOptions`; `max_length` is 64 unless given.
    """
    made: dict[str, Path] = {}

    def factory(checkpoint: Path, **options: Any) -> Path:
        require("torch")
        from partita.demo import heldout_path
        from partita.export.pipeline import ExportOptions, export
        from partita.library.exporting import replay, scorer
        from partita.library.place.target import supported_by_cpu
        from partita.runtime.ort.buffers import write_adapter

        options = {"max_length": 64, **options}
        key = json.dumps([str(checkpoint), options], sort_keys=True, default=str)
        if key not in made:
            out = tmp_path_factory.mktemp("package-") / "package"
            asked = ExportOptions(str(checkpoint), out, **options)
            export(
                asked,
                replay=replay,
                scorer=scorer,
                supports=supported_by_cpu,
                write_adapter=write_adapter,
                quality_text=heldout_path(),
            )
            made[key] = out
        return made[key]

    return factory
