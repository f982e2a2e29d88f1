"""Words that Partita's texts do not use, and the term to use: in texts of the code, docs and README.

`make check` runs it. It also finds sentences of the docs that are too long, and class members without a meaning.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TERMS = {
    r"nobody|somebody|anybody": "name the person or the program",
    r"guess(?:es|ed|ing)?": "draft token; infer",
    r"twins?|strays?|strangers?": "name the node or folder",
    r"elsewhere": "name the provider or place",
    r"passed over": "skipped",
    r"such an?": "name the thing",
    r"told|tells?|hears?|heard": "report, show, infer",
    r"says|said|say": "state, print, report, return",
    r"asks?|asked|asking": "request, set",
    r"wider|narrower": "more bits, fewer bits",
    r"(?:dis)?agree(?:s|d)?": "match, mismatch",
    r"(?:gives|gave) the known answer": "verified",
    r"(?<!request )(?<!response )(?<!the )bod(?:y|ies)(?! of the request)": "control-flow subgraph",
    r"wanted": "preferred, requested",
    r"the ones?|those that": "name the thing",
    r"claims?|claimed": "supports, is assigned",
    r"the original(?:'s)?": "the source model",
    r"beside": "next to, with",
    r"makes? (?:no )?sense": "valid, invalid",
    r"all the same": "anyway",
    r"(?:of|by) (?:ours|theirs)": "name the owner",
    r"will do": "is enough",
    r"have in common": "share",
    r"goes on": "continues",
    r"what (?:follows|is left)": "the rest, the text after it",
}
"""A pattern for whole words -> the term to use."""
MEMBERS = {
    "heard": "received",
    "lost": "other_reasons",
    "said": "message",
    "told": "message",
    "what": "kind, description, problem",
    "where": "path, location",
    "who": "provider, node",
    "why": "reason",
}
"""A name of a class member that does not show what it holds -> names to use."""
PATTERN = re.compile("|".join(rf"(?P<t{number}>\b(?:{words})\b)" for number, words in enumerate(TERMS)), re.IGNORECASE)
USE = tuple(TERMS.values())
DIAGRAM = re.compile("[─├└]")
MOST_WORDS = 40
"""Of a sentence in the docs."""
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)
"""Parts of a page that are no prose: code, link targets, comments."""


def strings(path: Path, *, docstrings: bool = False) -> Iterator[tuple[int, str]]:
    """Line and text of every string literal with a blank; docstrings, or the literals beside them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = (getattr(node, "body", None) for node in ast.walk(tree))
    statements = (each for body in bodies if isinstance(body, list) for each in body)
    documentation = {id(each.value) for each in statements if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:  # noqa: SIM102
            if (id(node) in documentation) == docstrings:
                yield node.lineno, re.sub("`[^`]*`", "", node.value)


def members(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every annotated class member."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                yield each.lineno, each.target.id


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line of a page, without its code."""
    text = CODE.sub(lambda match: "\n" * match[0].count("\n"), path.read_text(encoding="utf-8"))
    yield from enumerate(text.splitlines(), 1)


def sentences(path: Path) -> Iterator[str]:
    """Sentences of a page; a row of a table, a heading and an item of a list each end one."""
    text = CODE.sub(" code ", path.read_text(encoding="utf-8"))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+[.]) ?)", text):
        if not paragraph.lstrip().startswith("|") and not DIAGRAM.search(paragraph):
            yield from re.split(r"[.!?;][*\"')]*\s+", " ".join(paragraph.split()))


def pages() -> list[Path]:
    """Every page that people read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def findings(docstrings: bool = True) -> Iterator[str]:
    """A line for each word and member that is not to be used, and for each sentence that is too long."""
    texts = [(page, prose(page)) for page in pages()]
    for module in sorted((ROOT / "partita").rglob("*.py")):
        texts.append((module, strings(module)))
        if docstrings:
            texts.append((module, strings(module, docstrings=True)))
        for line, name in members(module):
            if name in MEMBERS:
                yield f"{module.relative_to(ROOT)}:{line}: member {name!r}; use: {MEMBERS[name]}"
    for path, lines in texts:
        for line, text in lines:
            for match in PATTERN.finditer(text):
                use = USE[int((match.lastgroup or "t0")[1:])]
                yield f"{path.relative_to(ROOT)}:{line}: {match[0]!r}; use: {use}"
    for page in pages():
        for sentence in sentences(page):
            if (count := len(sentence.split())) > MOST_WORDS:
                yield f"{page.relative_to(ROOT)}: a sentence of {count} words: {sentence[:60]}..."


def main() -> int:
    """Print every finding; returns the exit code."""
    found = list(findings())
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
