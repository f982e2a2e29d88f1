"""Write a text to calibrate the demo checkpoint on: documents that it was trained on, none of the held-out ones.

Run it as ``python -m tools.calibration_text OUT_FILE``; it needs no network. The documents are those of
`tools.train_demo`, in an order drawn with a fixed seed, up to a size. Another CPython than the one that the model card
of the checkpoint names has other documents, among them perhaps some of the held-out ones.
"""

import argparse
import random
from pathlib import Path

from tools.train_demo import SEPARATOR, Settings, capped, gather

SEED = 0
BYTES = 260_000
"""More than 128 windows of 512 of the checkpoint's tokens."""


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    documents = gather(Settings()).train
    random.Random(SEED).shuffle(documents)
    text = SEPARATOR.join(capped(documents, BYTES))
    out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
