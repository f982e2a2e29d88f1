"""Under which licence the weights in a folder are: what its model card, README or LICENSE file says, and no guess."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from partita.inspection.records import LicenceFacts
from partita.package import inside

CARDS = ("README.md", "README", "README.txt", "MODEL_CARD.md")
TEXTS = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "COPYING")
MOST_BYTES = 1 << 20
FRONT = re.compile(r"\A\s*---\s*\n(?P<matter>.*?)\n---\s*(\n|\Z)", re.DOTALL)
ENTRY = re.compile(r"^(?P<key>license|license_name|license_link)\s*:\s*(?P<value>\S.*?)\s*$", re.MULTILINE)
OTHER = "other"
"""What a model card says where the licence has a name of its own, which stands beside it."""


def licence_of(folder: Path) -> LicenceFacts:
    """What the files of the folder say; the first of card and licence text that does."""
    for name in CARDS:
        entries = _front_matter(_text(folder, name))
        if "license" in entries:
            named = entries.get("license_name") if entries["license"] == OTHER else None
            return LicenceFacts(name=named or entries["license"], source=name, link=entries.get("license_link"))
    for name in TEXTS:
        title = _title(_text(folder, name))
        if title:
            return LicenceFacts(name=title, source=name)
    return LicenceFacts(name=None, source=f"no licence in {', '.join(CARDS[:1])}, and no {' or '.join(TEXTS[:1])} file")


def _text(folder: Path, name: str) -> str:
    """The beginning of a text file; empty when there is none, or it cannot be read. Raises PackageError for what is no
    regular file in the folder.
    """
    try:
        with inside(folder, name).open("rb") as stream:
            return stream.read(MOST_BYTES).decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError:
        return ""


def _front_matter(text: str) -> Mapping[str, str]:
    """Entries about the licence between the two lines of dashes with which a model card of the hub begins."""
    found = FRONT.match(text)
    if found is None:
        return {}
    return {entry["key"]: entry["value"].strip("'\"") for entry in ENTRY.finditer(found["matter"])}


def _title(text: str) -> str:
    """The first line of a licence that says something."""
    lines = (line.strip(" #*\t") for line in text.splitlines())
    return next((line[:120] for line in lines if any(letter.isalnum() for letter in line)), "")
