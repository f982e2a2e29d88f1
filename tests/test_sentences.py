"""No sentence of ours is data: nothing compares, searches, cuts or looks up by text that says something.

This reads the source: a text with a blank in it, a name of one, or a table whose keys are such texts, in `==`, `in`,
`match`, a look-up, or a method that searches or cuts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.conftest import REPOSITORY

SEARCHES = frozenset(
    {"startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition"}
)
SEARCHES |= {"index", "rindex", "find", "rfind", "count", "replace", "get", "pop"}
Texts = Mapping[str, ast.expr]
"""Names of a module, imported ones among them -> what is assigned to them at its top."""

QUOTED = {
    # What others say is theirs, and can only be read.
    ("runtime/chain/provider_state.py", "STRICT"): "ONNX Runtime",
    ("runtime/chain/open_chain.py", "STRICT"): "ONNX Runtime",
    ("runtime/chain/provider_check.py", "STRICT"): "ONNX Runtime",
    ("library/place/dry_run.py", "'graph capture'"): "ONNX Runtime",
    ("runtime/lab/placement.py", "f'Node ({NODE}) '"): "ONNX Runtime",
    ("runtime/lab/placement.py", "f' for node `{NODE}` of type'"): "ONNX Runtime",
    ("runtime/ort/errors.py", "OUR_OWN"): "ONNX Runtime",
    ("runtime/ort/registry.py", "UNPACKED"): "ONNX Runtime",
    ("runtime/ort/registry.py", "'ORT Build Info: '"): "ONNX Runtime",
    ("runtime/cpu.py", "'model name'"): "/proc/cpuinfo",
}
"""File and expression -> whose text it is."""


def assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """What stands at the top of a module under a name."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def says(node: ast.expr | None, texts: Texts) -> bool:
    """Whether an expression is a text with a blank inside it, or a collection or the keys of some."""
    match node:
        case ast.Constant(value=str(text)):
            return " " in text.strip()
        case ast.JoinedStr(values=values):
            return " " in "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in values).strip()
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in texts and says(texts[name], {each: texts[each] for each in texts if each != name})
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return any(says(part, texts) for part in parts)
        case ast.Dict(keys=keys):
            return any(says(key, texts) for key in keys)
        case ast.Call(func=ast.Name(id="frozenset" | "set" | "tuple"), args=[given]):
            return says(given, texts)
        case ast.BinOp(left=left, right=right):
            return says(left, texts) or says(right, texts)
    return False


def used_as_data(tree: ast.AST, texts: Texts) -> Iterator[ast.expr]:
    """Sentences that something is decided by."""
    for node in ast.walk(tree):
        looked: list[ast.expr | None] = []
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                pairs = zip(ops, (left, *others), others, strict=False)
                kinds = ast.Eq | ast.NotEq | ast.In | ast.NotIn
                looked = [side for op, *sides in pairs if isinstance(op, kinds) for side in sides]
            case ast.Call(func=ast.Attribute(attr=method), args=[given, *_]) if method in SEARCHES:
                looked = [given]
            case ast.Subscript(slice=given):
                looked = [given] if isinstance(given, ast.Constant | ast.JoinedStr | ast.Name) else []
            case ast.MatchValue(value=given):
                looked = [given]
        yield from (side for side in looked if side is not None and says(side, texts))


def modules() -> Iterator[tuple[str, ast.Module, dict[str, ast.expr]]]:
    """Every file of Partita: its path, what is in it, and the names that stand for texts there."""
    root = REPOSITORY / "partita"
    trees = {path: ast.parse(path.read_bytes()) for path in sorted(root.rglob("*.py"))}
    named = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): assigned(tree) for path, tree in trees.items()
    }
    for path, tree in trees.items():
        texts = assigned(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in named:
                there = named[node.module]
                texts |= {each.asname or each.name: there[each.name] for each in node.names if each.name in there}
        yield path.relative_to(root).as_posix(), tree, texts


def test_source_does_not_use_messages_as_data() -> None:
    found = {(file, ast.unparse(text)) for file, tree, texts in modules() for text in used_as_data(tree, texts)}
    assert not found - set(QUOTED), "give what is said a key or a code beside it, and decide by that"
    assert not set(QUOTED) - found, "is no longer read"


@pytest.mark.parametrize(
    "planted",
    [
        "x == 'runs outside the device'",
        "x.why != WORDS",
        "WORDS in text",
        "text.removeprefix('default: it is')",
        "text.startswith(('not run', 'left out'))",
        "str(error).split(f'{path}: not found')",
        "(subject, name) in TABLE",
        "TABLE.get('onnxruntime package')",
        "match x:\n case 'one of them':\n  pass",
        "x in FROZEN",
    ],
)
def test_checker_finds_planted_use_of_message(planted: str) -> None:
    top = (
        "WORDS = 'so it is not captured'\nTABLE = {('environment', 'onnxruntime package')}\n"
        "FROZEN = frozenset({'left out', 'x'})\n"
    )
    tree = ast.parse(top + planted)
    assert list(used_as_data(tree, assigned(tree)))


@pytest.mark.parametrize("fine", ["x == 'left'", "text.split(', ')", "WORDS + x", "say(WORDS)", "f'{WORDS}: {x}'"])
def test_checker_accepts_single_words_and_printed_messages(fine: str) -> None:
    tree = ast.parse(f"WORDS = 'so it is not captured'\n{fine}")
    assert not list(used_as_data(tree, assigned(tree)))
