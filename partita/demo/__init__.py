"""The demo checkpoint that ships with Partita.

``checkpoint/`` is a small Llama-type decoder in the Hugging Face layout, trained from nothing on the
documentation text inside CPython's standard library; ``tools/train_demo.py`` made it and can make it again.
It is there so that every part of Partita can be tried without a network.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def checkpoint_path() -> Path:
    """Return the folder that holds the demo checkpoint (config, weights and tokenizer)."""
    return _HERE / "checkpoint"


def heldout_path() -> Path:
    """Return the held-out text: UTF-8, documents separated by two blank lines, none seen in training."""
    return _HERE / "heldout.txt"
