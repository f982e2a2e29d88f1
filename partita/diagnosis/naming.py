"""Information in a node's name: its module, its layer, and the file nodes that it replaces.

Partita's names are `<module path>/<Op>` or `<module path>/<Op>_<n>`. torch's older exporter and the builder of
onnxruntime-genai write a slash before and between modules: `/model/layers.1/mlp/MatMul_2`. TensorFlow's scopes have
slashes only between modules: `model/layers/1/mlp/MatMul`.

ONNX Runtime names new nodes after the nodes that they replace (`<exported name>/QuickGeluFusion/`) or after their
operator (`Transpose_token_4`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import takewhile

NO_MODULE = "no module"
LAYER_ITSELF = "layer (no submodule)"


def module_in(name: str) -> str | None:
    """The module path in the name of a node, with dots: `model.layers.1.mlp`; None if the name has none."""
    if name.startswith("/") or _is_path(name):
        return dotted(name.rpartition("/")[0]) or None
    head, slash, _ = name.partition("/")
    return (head or None) if slash else None


def _is_path(name: str) -> bool:
    """Whether a name without a leading slash is a path, like TensorFlow's scopes.

    Names of fused nodes end with a slash (`Mul/QuickGeluFusion/`), and paths of nested torch modules have dots.
    """
    return "." not in name.partition("/")[0] and name.count("/") > 1 and not name.endswith("/")


def dotted(path: str) -> str:
    """`/model/layers.1/mlp` as `model.layers.1.mlp`."""
    return ".".join(filter(None, path.split("/")))


def module_of(name: str, modules: Collection[str]) -> str | None:
    """The longest prefix of `name` before a slash that is one of `modules`; None if there is none."""
    cut = [name[:position] for position, letter in enumerate(name) if letter == "/"]
    if not name.startswith("/") and not _is_path(name):
        cut = cut[:1]
    return next((module for head in reversed(cut) if (module := dotted(head)) in modules), None)


def common_module(modules: Iterable[str | None]) -> str | None:
    """The common path prefix of `modules`; None without one, or if a module is unknown."""
    paths = [module.split(".") if module else [] for module in modules]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in alike) or None


def layer_of(module: str | None) -> int | None:
    """First integer component of a module path: 3 for model.layers.3.mlp."""
    return next((int(part) for part in (module or "").split(".") if _is_index(part)), None)


def module_group(module: str | None) -> str:
    """The layer-independent name of a module: self_attn for model.layers.3.self_attn.q_proj, norm for model.norm."""
    if not module:
        return NO_MODULE
    parts = module.split(".")
    for position, part in enumerate(parts):
        if _is_index(part):
            return parts[position + 1] if position + 1 < len(parts) else LAYER_ITSELF
    return parts[-1]


def replaced_by(name: str, exported: Collection[str]) -> tuple[str, ...]:
    """Names in `exported` that are prefixes of `name` before a slash, without `name` itself."""
    heads = (name[:at] for at, letter in enumerate(name) if letter == "/")
    return tuple(head for head in heads if head in exported)


def _is_index(part: str) -> bool:
    """Whether a component is an ASCII integer like 0 or 17."""
    return part.isascii() and part.isdigit() and len(part) < 10
