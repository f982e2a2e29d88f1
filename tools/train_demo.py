"""Train the demo checkpoint from the documentation text inside CPython's standard library.

Run it as ``python -m tools.train_demo OUT_FOLDER``. It needs torch, transformers and tokenizers, no network,
and minutes of two CPU cores. It writes two things:

* ``OUT_FOLDER/checkpoint/``: config, bf16 weights, tokenizer and training log, in the Hugging Face layout;
* ``OUT_FOLDER/heldout.txt``: text the model never saw, for measuring it.

The text is the docstrings, comment blocks and ``help()`` topics of the CPython that runs this script; a different
CPython gives a different model. The figures of the model card are those of the training log.
"""

import argparse
import ast
import hashlib
import importlib
import inspect
import io
import json
import math
import os
import platform
import random
import re
import runpy
import shutil
import sys
import sysconfig
import time
import tokenize
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SEPARATOR = "\n\n\n"  # between documents in heldout.txt; documents themselves hold at most one blank line in a row


@dataclass(frozen=True)
class Settings:
    """Every number that shapes the result."""

    seed: int = 20240
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 512
    rope_theta: float = 10000.0
    steps: int = 1700
    long_share: float = 0.22  # the last share of the steps sees full-length sequences; shorter ones are cheaper
    short_length: int = 256
    tokens_per_step: int = 4096
    peak_lr: float = 2e-3
    final_lr_share: float = 0.02
    warmup_steps: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    log_every: int = 100
    heldout_per_mille: int = 40
    heldout_bytes: int = 100_000
    headerless_percent: int = 25
    threads: int = 2


# --- text ------------------------------------------------------------------------------------------------------------

# Tests and vendored or generated trees hold little prose; encodings/ is tables; lib2to3 is deprecated grammar code.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "__pycache__", "__phello__"}
BOILERPLATE = re.compile(
    r"copyright|licen[cs]|all rights reserved|permission to|warrant(y|ies)|spdx|-\*-|vim:|pylint|type: ?ignore|\$Id",
    re.IGNORECASE,
)
# Credits name private people; a model should not recite their addresses.
CREDIT = re.compile(r"\b(author|written|contributed|maintain|modified|by|from|thanks|contact|e-?mail)\b", re.IGNORECASE)
ADDRESS = re.compile(r"[\w.+-]+(@| at )[\w-]+\.\w+")
RULER = re.compile(r"^[^\w\"'()\[\]{}.]*([-=*#~_+])\1{3,}\W*$")
LONG_PARAGRAPH, LONG_LINE = 100, 40
COMPILED = (type, types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType)


def _stable_number(text: str) -> int:
    """A number that depends on the text alone; ``hash`` changes from run to run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def clean(text: str, keep_rulers: bool = False) -> str:
    """Return the text without paragraphs of licences and credits, rulers, trailing blanks and repeated blank lines."""
    lines = [line.rstrip() for line in text.expandtabs().splitlines()]
    kept = [line for line in lines if keep_rulers or not RULER.match(line)]
    paragraphs = re.split(r"\n{2,}", "\n".join(kept).strip("\n"))
    return "\n\n".join(
        part
        for part in paragraphs
        if part.strip() and not BOILERPLATE.search(part) and not (ADDRESS.search(part) and CREDIT.search(part))
    )


def _header(node: Any, qualified: str) -> str:
    """The line that introduces a documented module, class or function; empty when it would be very long."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        line = f"class {qualified}({bases}):" if bases else f"class {qualified}:"
    elif isinstance(node, ast.Module):
        line = f"module {qualified}:"
    else:
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        line = f"def {qualified}({ast.unparse(node.args)}){result}:"
    return line if len(line) <= 240 else ""


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[ast.AST, str]]:
    """The classes and functions directly inside a node, also those behind if, try and with."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, prefix + child.name
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _definitions(child, prefix)


def _docstring(node: Any) -> str:
    return clean(inspect.cleandoc(ast.get_docstring(node, clean=False) or ""))


def _entry(node: Any, qualified: str) -> str:
    """Header and docstring of one node; empty when the docstring says nothing."""
    text, line = _docstring(node), _header(node, qualified)
    if _letters(text) < 20:
        return ""
    return f"{line}\n\n{text}" if line else text


def docstring_documents(tree: ast.Module, module: str, settings: Settings) -> Iterator[str]:
    """Yield one document per module text and function, and one per class together with its methods.

    A share of the docstrings stands alone without its header, so that a prompt may also start with plain prose.
    """
    if text := _entry(tree, module):
        yield text
    pending: list[tuple[ast.AST, str]] = list(_definitions(tree))
    while pending:
        node, qualified = pending.pop(0)
        members = list(_definitions(node, f"{qualified}.")) if isinstance(node, ast.ClassDef) else []
        pending += [member for member in members if isinstance(member[0], ast.ClassDef)]
        grouped = []
        for part, name in [(node, qualified), *(m for m in members if not isinstance(m[0], ast.ClassDef))]:
            text = _entry(part, name)
            if text and _stable_number(module + name) % 100 < settings.headerless_percent:
                yield _docstring(part)
            elif text:
                grouped.append(text)
        if grouped:
            yield "\n\n".join(grouped)


def comment_documents(source: str) -> Iterator[str]:
    """Yield each block of consecutive full-line comments that reads like prose, and is no disabled code."""
    blocks: list[list[str]] = []
    last = (-2, -1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line[: token.start[1]].strip():
            continue
        if (token.start[0] - 1, token.start[1]) != last:
            blocks.append([])
        blocks[-1].append(re.sub(r"^#+:?", "", token.string))
        last = token.start
    for block in blocks:
        text = clean(inspect.cleandoc("\n".join(["", *block])))
        if _letters(text) >= max(40, 0.6 * len(text)) and not _is_code(text):
            yield text


def _is_code(text: str) -> bool:
    try:
        return bool(ast.parse(inspect.cleandoc(text)).body)
    except (SyntaxError, ValueError):
        return False


def compiled_documents(stdlib: Path) -> Iterator[str]:
    """Yield the docstrings of the modules written in C, among them the built-in functions, types and exceptions."""
    extensions = {path.name.split(".")[0] for path in (stdlib / "lib-dynload").glob("*.so")}
    for module_name in sorted(extensions | set(sys.builtin_module_names)):
        if "test" in module_name or module_name.startswith(("xx", "_xx")):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # some modules announce that they will be removed
                module = importlib.import_module(module_name)
        except ImportError:  # an extension whose system library is missing
            continue
        for name, value in sorted(vars(module).items()):
            parts = [_compiled_entry(name, value)]
            if isinstance(value, type):
                parts += [_compiled_entry(f"{name}.{key}", member) for key, member in sorted(vars(value).items())]
            yield "\n\n".join(filter(None, parts))


def _compiled_entry(name: str, value: object) -> str:
    """Header and docstring of one object written in C; empty when it has none of its own."""
    text = getattr(value, "__doc__", None)
    if not isinstance(text, str) or not isinstance(value, COMPILED):
        return ""
    signature = re.sub(r"\$module(, /)?(, )?|\$", "", getattr(value, "__text_signature__", None) or "()")
    line = f"class {name}:" if isinstance(value, type) else f"def {name}{signature}:"
    text = clean(inspect.cleandoc(text))
    return f"{line}\n\n{text}" if text else ""


def module_files(stdlib: Path) -> list[Path]:
    """Return the standard library's own source files, in a fixed order."""
    found = []
    for path in sorted(stdlib.rglob("*.py")):
        parents = path.relative_to(stdlib).parts[:-1]
        if SKIPPED_FOLDERS.isdisjoint(parents) and not any(part.startswith("config-") for part in parents):
            found.append(path)
    return [path for path in found if path.name not in {"topics.py", "_sysconfigdata.py"}]


def module_documents(path: Path, stdlib: Path, settings: Settings) -> list[str]:
    """Return the documents of one source file."""
    with tokenize.open(path) as stream:
        source = stream.read()
    name = ".".join(path.relative_to(stdlib).with_suffix("").parts).removesuffix(".__init__")
    return [*docstring_documents(ast.parse(source), name, settings), *comment_documents(source)]


def without_repeats(documents: Iterable[str]) -> list[str]:
    """Drop repeated documents, and long paragraphs that an earlier document already had."""
    seen: set[str] = set()
    kept = []
    for document in dict.fromkeys(documents):
        parts = [part for part in document.split("\n\n") if len(part) < LONG_PARAGRAPH or part not in seen]
        seen.update(parts)
        if any(len(part) >= 20 for part in parts):
            kept.append("\n\n".join(parts))
    return kept


def _long_lines(text: str) -> set[str]:
    """The lines that are long enough to be recognised as copied."""
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= LONG_LINE}


def gather(settings: Settings) -> tuple[list[str], list[str], int, list[str]]:
    """Return the documents to train on and those held out, the number of modules, and the names of those held out.

    Whole modules are held out, chosen by a hash of their path.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    topics: dict[str, str] = runpy.run_path(str(stdlib / "pydoc_data" / "topics.py"))["topics"]
    # The underlines of titles are part of how the texts behind help('topic') look, so they stay.
    train = [*(clean(topics[name], keep_rulers=True) for name in sorted(topics)), *compiled_documents(stdlib)]
    heldout: list[str] = []
    names: list[str] = []
    files = module_files(stdlib)
    for path in files:
        name, documents = path.relative_to(stdlib).as_posix(), module_documents(path, stdlib, settings)
        if _stable_number(f"partita:{name}") % 1000 < settings.heldout_per_mille and documents:
            heldout += documents
            names.append(name)
        else:
            train += documents
    train = without_repeats(train)
    known = set().union(*map(_long_lines, train))
    # Sister modules share text word for word; without this the held-out figures would reward copying.
    fresh = [text for text in without_repeats(heldout) if known.isdisjoint(_long_lines(text))]
    random.Random(settings.seed).shuffle(fresh)  # so that the size cap does not favour the first modules
    kept, size = list[str](), 0
    for document in fresh:
        size += len((document + SEPARATOR).encode())
        if size > settings.heldout_bytes:
            break
        kept.append(document)
    return train, kept, len(files), names


# --- tokenizer -------------------------------------------------------------------------------------------------------

# The model is not trained on dialogue; the template only gives chat interfaces a defined text to send.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- message['role'] | capitalize + ': ' + message['content'] | trim + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}
"""


def train_tokenizer(documents: list[str], settings: Settings) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; the 256 byte symbols are in the vocabulary, so any UTF-8 text survives."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bos = (BOS, bpe.token_to_id(BOS))
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=settings.context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: Any, documents: list[str]) -> list[list[int]]:
    """Return each document as ids: the tokenizer puts bos in front, eos is added here."""
    rows: list[list[int]] = tokenizer(documents, verbose=False)["input_ids"]  # silent: documents may exceed the context
    return [[*row, tokenizer.eos_token_id] for row in rows]


# --- model and training ----------------------------------------------------------------------------------------------


def build_model(tokenizer: Any, settings: Settings) -> LlamaForCausalLM:
    """Return an untrained model."""
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.context,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # measured faster than sdpa once compiled: 0.35 against 0.44 s a step
    return model


class Packer:
    """Serves batches of packed documents; each pass over the data has a new order and no padding.

    Attention may look across a document boundary inside a sequence: the bos token is enough of a mark.
    """

    def __init__(self, rows: list[list[int]], seed: int) -> None:
        """Keep the encoded documents and seed the order."""
        self._rows, self._random = rows, random.Random(seed)
        self._stream: list[int] = []

    def batch(self, count: int, length: int) -> torch.Tensor:
        """Return ``count`` sequences of ``length`` tokens."""
        while len(self._stream) < count * length:
            order = list(self._rows)
            self._random.shuffle(order)
            self._stream += [token for row in order for token in row]
        taken, self._stream = self._stream[: count * length], self._stream[count * length :]
        return torch.tensor(taken).view(count, length)


def learning_rate(step: int, settings: Settings) -> float:
    """Return the rate at a step: linear warm-up, then half a cosine."""
    if step < settings.warmup_steps:
        return settings.peak_lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / (settings.steps - settings.warmup_steps)
    share = settings.final_lr_share
    return settings.peak_lr * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * done)))


def next_token_loss(model: Any, batch: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the cross-entropy of predicting each token from those before it, in nats."""
    logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction=reduction)


def heldout_loss(model: Any, windows: torch.Tensor) -> float:
    """Return the mean loss over some packed held-out text, for watching the run."""
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = [next_token_loss(model, part).item() for part in torch.split(windows, 8)]
    model.train()
    return sum(losses) / len(losses)


def train(
    model: LlamaForCausalLM, rows: list[list[int]], watched: torch.Tensor, settings: Settings
) -> list[dict[str, float]]:
    """Train the model in place and return the loss curve; each of its rows is printed."""
    decayed = ([p for p in model.parameters() if p.ndim > 1], settings.weight_decay)
    gains = ([p for p in model.parameters() if p.ndim == 1], 0.0)
    groups = [{"params": params, "weight_decay": decay} for params, decay in (decayed, gains)]
    optimizer = torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=True)
    packer = Packer(rows, settings.seed)
    loss_of: Callable[..., torch.Tensor] = next_token_loss
    if shutil.which("g++") or shutil.which("clang++"):  # 0.35 instead of 0.6 s a step on two cores
        loss_of = torch.compile(next_token_loss, dynamic=False)
    curve: list[dict[str, float]] = []
    recent: list[float] = []
    started = time.monotonic()
    model.train()
    for step in range(settings.steps):
        is_long = step >= settings.steps * (1 - settings.long_share)
        length = settings.context if is_long else settings.short_length
        batch = packer.batch(settings.tokens_per_step // length, length)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if (step + 1) % settings.log_every == 0 or step + 1 == settings.steps:
            losses = sum(recent) / len(recent), heldout_loss(model, watched)
            row: dict[str, float] = {"step": step + 1, "tokens": (step + 1) * settings.tokens_per_step}
            row |= zip(("train_loss", "heldout_loss"), (round(each, 4) for each in losses), strict=True)
            curve.append({**row, "seconds": round(time.monotonic() - started, 1)})
            recent.clear()
            print(json.dumps(curve[-1]), flush=True)
    return curve


# --- saving and measuring --------------------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write config, bf16 weights, generation defaults and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = True
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for the owner alone, but meant to be read by all
    tokenizer.save_pretrained(folder)
    # Newer transformers write a class name that older ones do not know; this one is understood by both.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def measure(model: Any, tokenizer: Any, documents: list[str], context: int) -> dict[str, float]:
    """Return perplexity per token and bits per byte over whole documents.

    Each document starts with bos, which is given, and ends with eos, which is predicted. A document longer than the
    context is cut into pieces that overlap by one token, so every token is predicted once.
    """
    nats, count = 0.0, 0
    with torch.no_grad():
        for row in encode(tokenizer, documents):
            for start in range(0, len(row) - 1, context - 1):
                piece = torch.tensor([row[start : start + context]])
                nats += next_token_loss(model, piece, "sum").item()
                count += piece.shape[1] - 1
    size, loss = sum(len(text.encode()) for text in documents), nats / count
    figures = {"documents": len(documents), "bytes": size, "tokens": count, "loss": loss}
    return {**figures, "perplexity": math.exp(loss), "bits_per_byte": nats / math.log(2) / size}


def run(out: Path, settings: Settings) -> dict[str, Any]:
    """Do the whole job and return the facts of the training log."""
    started = time.monotonic()
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    out.mkdir(parents=True, exist_ok=True)
    folder = out / "checkpoint"
    documents, heldout, modules, heldout_modules = gather(settings)
    (out / "heldout.txt").write_text(SEPARATOR.join(heldout) + "\n", encoding="utf-8", newline="\n")
    tokenizer = train_tokenizer(documents, settings)
    rows = encode(tokenizer, documents)
    size, tokens = sum(len(text.encode()) for text in documents), sum(map(len, rows))
    print(f"{len(rows)} documents, {size} bytes, {tokens} tokens", flush=True)
    print(f"held out: {', '.join(heldout_modules)}", flush=True)
    model = build_model(tokenizer, settings)
    watched = Packer(encode(tokenizer, heldout), settings.seed).batch(32, settings.context)
    curve = train(model, rows, watched, settings)
    save(model, tokenizer, folder)
    facts: dict[str, Any] = asdict(settings) | {
        "parameters": model.num_parameters(),
        "python": platform.python_version(),
        "modules": modules,
        "heldout_count": len(heldout_modules),
        "heldout_modules": heldout_modules,
        "train_documents": len(rows),
        "train_bytes": size,
        "train_tokens": tokens,
        "seen_tokens": settings.steps * settings.tokens_per_step,
        "epochs": settings.steps * settings.tokens_per_step / tokens,
        "train_seconds": curve[-1]["seconds"],
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "weight_bytes": (folder / "model.safetensors").stat().st_size,
    }
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    facts |= measure(saved, AutoTokenizer.from_pretrained(folder), heldout, settings.context)
    facts["total_seconds"] = round(time.monotonic() - started, 1)
    log = {"facts": facts, "curve": curve}
    (folder / "training_log.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    return facts


def main(arguments: list[str] | None = None) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser("python -m tools.train_demo", description="Train Partita's demo checkpoint.")
    parser.add_argument("out", type=Path, help="folder for checkpoint/ and heldout.txt")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimizer steps (default %(default)s)")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    facts = run(chosen.out, Settings(steps=chosen.steps))
    print(f"held-out perplexity {facts['perplexity']:.2f}, bits per byte {facts['bits_per_byte']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
