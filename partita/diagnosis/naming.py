"""Information in a node's name: its module, its layer, and the exported nodes whose work it does.

Exported nodes are called `<module path>/<Op>` or `<module path>/<Op>_<n>`. torch's older exporter, and the builder of
onnxruntime-genai, have a slash before and between modules: `/model/layers.1/mlp/MatMul_2`. TensorFlow's scopes have one
between them alone: `model/layers/1/mlp/MatMul`.

ONNX Runtime names the nodes it makes after the nodes they replace (`<exported name>/QuickGeluFusion/`) or after their
operator (`Transpose_token_4`). Knows no facts and no report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import takewhile

NO_MODULE = "no module"
LAYER_ITSELF = "layer (no submodule)"


def module_in(name: str) -> str | None:
    """The module path in the name of a node, with dots: `model.layers.1.mlp` of all forms; None where it has none."""
    if name.startswith("/") or _is_path(name):
        return dotted(name.rpartition("/")[0]) or None
    head, slash, _ = name.partition("/")
    return (head or None) if slash else None


def _is_path(name: str) -> bool:
    """Whether a name without a slash before it is a path all the same, as TensorFlow's scopes are.

    What ONNX Runtime fuses ends with a slash (`Mul/QuickGeluFusion/`), and a module of torch that has others in it has
    dots.
    """
    return "." not in name.partition("/")[0] and name.count("/") > 1 and not name.endswith("/")


def dotted(path: str) -> str:
    """`/model/layers.1/mlp` as `model.layers.1.mlp`."""
    return ".".join(filter(None, path.split("/")))


def module_of(name: str, modules: Collection[str]) -> str | None:
    """The longest beginning of `name`, up to one of its slashes, that is one of the known `modules`."""
    cut = [name[:position] for position, letter in enumerate(name) if letter == "/"]
    if not name.startswith("/") and not _is_path(name):
        cut = cut[:1]
    return next((module for head in reversed(cut) if (module := dotted(head)) in modules), None)


def common_module(modules: Iterable[str | None]) -> str | None:
    """The path that all of `modules` begin with; None when there is none, or one of them is unknown."""
    paths = [module.split(".") if module else [] for module in modules]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in alike) or None


def layer_of(module: str | None) -> int | None:
    """First integer component of a module path: 3 for model.layers.3.mlp."""
    for part in (module or "").split("."):
        if _is_index(part):
            return int(part)
    return None


def module_group(module: str | None) -> str:
    """The name a module goes by over all layers: self_attn for model.layers.3.self_attn.q_proj, norm for model.norm."""
    if not module:
        return NO_MODULE
    parts = module.split(".")
    for position, part in enumerate(parts):
        if _is_index(part):
            return parts[position + 1] if position + 1 < len(parts) else LAYER_ITSELF
    return parts[-1]


def replaced_by(name: str, exported: Collection[str]) -> tuple[str, ...]:
    """Names in `exported` that `name` begins with, cut at a slash; `name` itself does not count."""
    return tuple(head for head in heads(name) if head in exported)


def heads(name: str) -> Iterator[str]:
    """Every part of `name` that ends before one of its slashes, shortest first."""
    position = name.find("/")
    while position >= 0:
        if position:
            yield name[:position]
        position = name.find("/", position + 1)


def _is_index(part: str) -> bool:
    """True for a component like 0 or 17; other scripts' digits are names."""
    return part.isascii() and part.isdigit() and len(part) < 10
