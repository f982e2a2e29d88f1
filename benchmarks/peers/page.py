"""benchmarks/results/README.md and what is printed: the same tables, in Markdown. Pure: from records alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.peers.records import Contender, Machine, PeersResult, ShapeResult, Spread, Work, Written
from partita.observations.text_format import decimals, human_bytes, plural

DASH = "-"
PREAMBLE = """# Beside the peers

`make bench-peers` runs Partita beside [onnxruntime-genai](https://github.com/microsoft/onnxruntime-genai) (its own
builder and runtime), [llama.cpp](https://github.com/ggml-org/llama.cpp) (llama-cpp-python, built from source for the
machine), [optimum-onnx](https://github.com/huggingface/optimum-onnx) (`ORTModelForCausalLM`) and
[transformers](https://github.com/huggingface/transformers), each in an environment of its own, and writes this page.

## How it is measured

- **Models** have random weights, in bfloat16: speed and memory do not depend on what they say. Each peer's own
  exporter makes its files from that checkpoint; those of llama.cpp are written by `benchmarks/peers/gguf_write.py`
  and quantised by llama.cpp.
- **Work**: batch 1, greedy. The same token ids for everybody, the same number of new tokens, the same threads;
  end-of-text tokens do not end anything. All logits have to be finite.
- **Turns**: a process per contender. In a round each answers every prompt once, and every round is begun by another
  one; the first round warms up and is not counted. Figures are medians, with quartiles in brackets. Contenders of one
  width of weights run together; the widths run one after the other. A ratio within a width is the median of the
  ratios of the rounds.
- **Start**: in addition each contender is started anew in turns: `load` is opening the model, `first token` is load
  and a first prompt, both without importing libraries; `peak` is the largest resident memory of that process, mapped
  files included.
- **Bytes per weight** are those of the model's files by the parameters of the checkpoint, tied embeddings counted
  once.
- A run is **disturbed** when the machine was busy as it began, or other processes took part of a core during the
  turns. Such figures are marked, and are not to be compared with others.
"""
NOTHING = "\nNo figures have been published yet.\n"


def page(results: Sequence[PeersResult]) -> str:
    """The whole page."""
    parts = [PREAMBLE, *(section for result in results for section in sections(result))]
    return "\n".join(parts) if results else PREAMBLE + NOTHING


def sections(result: PeersResult) -> Iterator[str]:
    """One run."""
    yield f"## {', '.join(shape.title for shape in result.shapes) or 'Nothing'}: {result.date}\n"
    for reason in result.disturbed:
        yield f"**Disturbed**: {reason}.\n"
    yield _machine(result)
    for shape in result.shapes:
        yield f"### {shape.title}\n"
        settings = f"{shape.parameters:,} parameters, checkpoint {human_bytes(shape.checkpoint_bytes)}."
        rounds = f"Medians of {plural(result.rounds, 'round')}, {_new_tokens(shape)} new tokens after each prompt."
        yield f"{settings} {rounds}\n"
        yield _speeds(shape)
        yield _files(shape, result.start_prompt)
        yield _beside(shape)
        yield _notes(shape)


def _new_tokens(shape: ShapeResult) -> str:
    """How many tokens everybody made."""
    return " or ".join(sorted({str(work.new_tokens) for entry in shape.contenders for work in entry.works})) or "no"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is set to the right."""
    ruled = ["---", *("---:" for _ in heads[1:])]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (heads, ruled, *rows)]
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float]) -> str:
    """`45.2 (44.8 to 46.0)`."""
    found = Spread.of(list(values))
    return f"{decimals(found.median)} ({decimals(found.low)} to {decimals(found.high)})"


def _machine(result: PeersResult) -> str:
    machine: Machine = result.machine
    load = DASH if machine.load_average is None else decimals(machine.load_average)
    forms = machine.rates.forms.items()
    rows = [
        ("processor", f"{machine.processor}, {machine.cores} cores"),
        *([("GPU", machine.gpu)] if machine.gpu is not None else []),
        ("memory", human_bytes(machine.memory_bytes)),
        ("system", f"{machine.system}, Python {machine.python}"),
        ("threads of every contender", str(machine.threads)),
        ("load average as it began", load),
        ("read bandwidth", f"{decimals(machine.rates.read_bytes_per_second / 1e9)} GB/s"),
        *((f"{name} products, 256 rows", f"{decimals(each.gemm_flops / 1e9)} GFLOP/s") for name, each in forms),
        ("Partita", f"{result.partita_version}{f', commit {result.commit}' if result.commit else ''}"),
        ("command", f"`{result.command}`"),
    ]
    return table(("machine", ""), rows)


def _speeds(shape: ShapeResult) -> str:
    """Tokens per second; a column per prompt and phase."""
    prompts = sorted({work.prompt_tokens for entry in shape.contenders for work in entry.works})
    heads = ["tokens per second", *(f"prefill {n}" for n in prompts), *(f"decode after {n}" for n in prompts)]
    rows = []
    for entry in shape.contenders:
        works = [entry.work(n) for n in prompts]
        if any(works):
            cells = [_rate(work, rates) for rates in (prefill, decode) for work in works]
            rows.append([entry.name, *cells])
    return table(heads, rows) if rows else ""


def _rate(work: Work | None, rates: Callable[[Work], list[float]]) -> str:
    return DASH if work is None else spread(rates(work))


def _files(shape: ShapeResult, start_prompt: int) -> str:
    """Size, start, memory, export."""
    heads = [
        "start, memory, export",
        "files",
        "bytes per weight",
        "load s",
        f"first token s, {start_prompt} tokens",
        "peak at start",
        "peak in turns",
        "export s",
        "peak of export",
    ]
    return table(heads, [_file_row(entry, shape) for entry in shape.contenders if entry.starts or entry.written])


def _file_row(entry: Contender, shape: ShapeResult) -> list[str]:
    loads = [each.load_seconds for each in entry.starts]
    peaks = [each.peak_rss_bytes for each in entry.starts]
    first = [each.first_token_seconds for each in entry.starts]
    return [
        entry.name,
        human_bytes(entry.file_bytes),
        DASH if entry.file_bytes is None else f"{entry.file_bytes / shape.parameters:.3f}",
        decimals(statistics.median(loads)) if loads else DASH,
        decimals(statistics.median(first)) if first else DASH,
        human_bytes(int(statistics.median(peaks))) if peaks else DASH,
        human_bytes(entry.peak_rss_bytes),
        _export_seconds(entry.written),
        human_bytes(entry.written.peak_rss_bytes) if entry.written else DASH,
    ]


def _export_seconds(written: Written | None) -> str:
    """Marked where the machine was busy with something else."""
    if written is None:
        return DASH
    return f"{decimals(written.seconds)}{' (disturbed)' if written.disturbed else ''}"


def _beside(shape: ShapeResult) -> str:
    """How many times as fast ours is as each other one of its width; a row per pair."""
    rows: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for ours, theirs in itertools.product(shape.contenders, repeat=2):
        if ours.peer == "partita" != theirs.peer and ours.bits == theirs.bits:
            for mine in ours.works:
                other = theirs.work(mine.prompt_tokens)
                if other is not None and mine.turns:
                    speeds = (mine.prompt_tokens, ratio(mine, other, prefill), ratio(mine, other, decode))
                    rows.setdefault((ours.name, theirs.name), []).append(speeds)
    cells = [
        (f"{ours} / {theirs}", *(" / ".join(f"{one[place]:.2f}" for one in sorted(found)) for place in (1, 2)))
        for (ours, theirs), found in rows.items()
    ]
    prompts = " / ".join(str(one[0]) for one in sorted(next(iter(rows.values()), [])))
    return table(("times as fast", f"prefill {prompts}", f"decode after {prompts}"), cells) if cells else ""


def ratio(ours: Work, theirs: Work, rates: Callable[[Work], list[float]]) -> float:
    """How many times as fast ours is: the median over the rounds where both have as many, else of the medians."""
    left, right = rates(ours), rates(theirs)
    if len(left) == len(right):
        return statistics.median(mine / other for mine, other in zip(left, right, strict=True))
    return statistics.median(left) / statistics.median(right)


def prefill(work: Work) -> list[float]:
    """Prompt tokens per second."""
    return work.prefill_rates


def decode(work: Work) -> list[float]:
    """New tokens per second."""
    return work.decode_rates


def _notes(shape: ShapeResult) -> str:
    """Versions, settings, whose tokens differ, and who could not run."""
    lines = []
    for entry in shape.contenders:
        known = [f"{name} {version}" for name, version in entry.versions.items()]
        told = [f"{name}: {value}" for name, value in entry.settings.items()]
        if known or told:
            lines.append(f"- {entry.name}: {'; '.join([*known, *told])}")
        if entry.error:
            lines.append(f"- {entry.name} has no figures, or not all: {entry.error}")
        lines += [f"- {entry.name}: {fault}" for fault in _faults(entry)]
    return "\n".join(lines) + "\n"


def _faults(entry: Contender) -> Iterator[str]:
    for work in entry.works:
        if not work.finite:
            yield f"logits after {work.prompt_tokens} tokens are not all finite"
        if not work.tokens_per_turn_equal:
            yield f"the turns with {work.prompt_tokens} tokens did not give the same tokens"
