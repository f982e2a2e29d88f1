"""`python -m benchmarks.peers.quality`: what llama.cpp's forms cost the embedded checkpoint, beside ours.

The text is that of `partita evaluate`, in the same windows: a package of ours holds the tokens, and what the original
model made of them. llama.cpp reads the same tokens; so the perplexities have one denominator. Divergence is measured
from the original by an export, and from its own F16 form with llama.cpp. docs/precisions.md has the table.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.peers.page import table
from benchmarks.peers.plan import ENTRIES, Entry, Places
from benchmarks.peers.prepare import environ, file_bytes, parameters, prepare
from partita.demo import checkpoint_path
from partita.package.folder import QUALITY, read_manifest

SHAPE = "demo"
FORMS = ("f16", "q8_0", "q4_0", "q4_0-pure", "q4_k_m")
OURS = ("int4-b64", "int4-b128", "int8-b128")
LENGTH = 512
"""The cache of the packages: a window of `partita evaluate`."""


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.quality", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/peers"))
    parser.add_argument("--environments", type=Path, default=Path(".venvs"))
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    given = parser.parse_args()
    places = Places(given.work, given.environments.absolute())
    _link(places)
    entries = [each for each in ENTRIES if each.peer == "partita" and each.form in OURS]
    entries += [each for each in ENTRIES if each.peer == "llama" and each.form in FORMS]
    _reference(places).unlink(missing_ok=True)
    for entry in entries:
        prepare(entry, SHAPE, places, LENGTH, given.threads)
    text = _text(places.model(SHAPE, entries[0]))
    rows = [_row(entry, text, places, given.threads) for entry in entries]
    heads = ("form", "bytes", "bits per weight", "perplexity", "ratio", "same best token", "KL mean")
    print(table(heads, rows))
    return 0


def _link(places: Places) -> None:
    """The embedded checkpoint, where checkpoints are looked for."""
    place = places.checkpoint(SHAPE)
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(checkpoint_path(), target_is_directory=True)


def _text(package: Path) -> dict[str, Any]:
    """windows, losses and best of the original; see partita.runtime.verify.quality."""
    from safetensors.numpy import load_file

    return dict(load_file(package / QUALITY))


def _row(entry: Entry, text: dict[str, Any], places: Places, threads: int) -> tuple[str, ...]:
    """One form: its size, and the text read with it."""
    model = places.model(SHAPE, entry)
    read = _read_ours(model, threads) if entry.peer == "partita" else _read_llama(model, text, places, threads)
    ratio, perplexity, same = compared(text, read.losses, read.best)
    size = file_bytes(model)
    bits = f"{8 * size / parameters(places.checkpoint(SHAPE)):.2f}"
    found = (f"{perplexity:.3f}", f"{ratio:.4f}", f"{100 * same:.1f} %", f"{read.divergence:.4f}")
    return (entry.name, f"{size:,}", bits, *found)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a form made of the text."""

    losses: Any
    """[W, L - 1] nats."""
    best: Any
    """[W, L - 1] tokens."""
    divergence: float
    """Mean, in nats."""


def _reference(places: Places) -> Path:
    """Distributions of the first form of llama.cpp."""
    return places.work / SHAPE / "reference.npy"


def compared(text: dict[str, Any], losses: Any, best: Any) -> tuple[float, float, float]:
    """Ratio of perplexities, perplexity, and the share of tokens of which both think the same most likely.

    Tokens of which the original has no loss do not count.
    """
    heard = ~np.isnan(text["losses"])
    mean, original = losses[heard].mean(), text["losses"][heard].astype(np.float64).mean()
    return math.exp(mean - original), math.exp(mean), float((best == text["best"])[heard].mean())


def _read_llama(model: Path, text: dict[str, Any], places: Places, threads: int) -> Reading:
    """With llama.cpp, in its own environment."""
    windows, out = places.work / SHAPE / "windows.npy", places.work / SHAPE / f"{model.name}.npz"
    np.save(windows, text["windows"].astype(np.int64))
    python = places.environments / "peer-llama" / "bin" / "python"
    words = [str(model), str(windows), str(out), str(threads), str(_reference(places))]
    command = [str(python), "-m", "benchmarks.peers.children.llama", *words]
    subprocess.run(command, check=True, env=environ(threads))
    with np.load(out) as found:
        return Reading(found["losses"], found["best"], float(found["divergence"].mean()))


def _read_ours(package: Path, threads: int) -> Reading:
    """With the scorer behind `partita evaluate`."""
    from partita.providers.resolve import parse_chain
    from partita.runtime.verify.comparison import Logits
    from partita.runtime.verify.quality import loss, open_scorer

    windows = _text(package)["windows"].astype(np.int64)
    losses, best = np.full((len(windows), windows.shape[1] - 1), np.nan), np.zeros_like(windows[:, 1:])
    with open_scorer(package, parse_chain("cpu"), threads=threads) as scorer:
        for number, window in enumerate(windows):

            def hear(row: int, position: int, logits: Logits, number: int = number) -> None:
                losses[number, position] = loss(logits, int(windows[number, position + 1]))
                best[number, position] = int(logits.argmax())

            scorer.score([window[:-1].tolist()], hear)
    quality = read_manifest(package).quality
    assert quality is not None
    return Reading(losses, best, quality.kl_mean)


if __name__ == "__main__":
    sys.exit(main())
