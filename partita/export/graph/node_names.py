"""Name the nodes of a traced graph by module and operator."""

from __future__ import annotations

import re

import onnx_ir as ir

MODULE, CLASS, SOURCE = "partita.module", "partita.class", "partita.source"
"""Node metadata keys: module path, module class, file:line of the modelling code."""
ROOT = "hf"
"""Attribute of the model inside the traced wrapper; stripped from every name."""


def name_nodes(model: ir.Model) -> None:
    """Name every node `<module path>/<Op>[_n]` and its outputs after it.

    Module, class and source line become metadata.
    """
    seen: dict[str, int] = {}
    keep = {v.name for v in (*model.graph.inputs, *model.graph.outputs)} | set(model.graph.initializers)
    for node in model.graph:
        module = _settle_metadata(node)
        base = f"{module or 'graph'}/{node.op_type}"
        number = seen.get(base, 0)
        seen[base] = number + 1
        node.name = f"{base}_{number}" if number else base
        for index, value in enumerate(node.outputs):
            if value.name not in keep:
                value.name = f"{node.name}_output_{index}"


def _settle_metadata(node: ir.Node) -> str:
    """Replace torch's metadata by three short entries. Returns the module path, "" at the top."""
    properties = node.metadata_props
    if MODULE in properties:
        return properties[MODULE]
    scopes = _as_list(properties.get("pkg.torch.onnx.name_scopes"))
    classes = _as_list(properties.get("pkg.torch.onnx.class_hierarchy"))
    paths = [s.removeprefix(ROOT).removeprefix(".") for s in scopes[:-1] if s == ROOT or s.startswith(f"{ROOT}.")]
    source = _source_line(properties.get("pkg.torch.onnx.stack_trace", ""))
    properties.clear()
    module = paths[-1] if paths else ""
    properties[MODULE] = module
    if len(classes) >= len(scopes) - 1 and len(scopes) > 1:
        properties[CLASS] = classes[len(scopes) - 2].rpartition(".")[2]
    if source:
        properties[SOURCE] = source
    return module


def _as_list(text: str | None) -> list[str]:
    """Parse torch's metadata lists, which are Python literals of plain strings."""
    return re.findall(r"'([^']*)'", text or "")


def _source_line(stack: str) -> str:
    """file:line of the innermost frame of modelling code, relative to site-packages."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack)
    for path, line in reversed(frames):
        if "modeling_" in path or "/transformers/" in path:
            return f"{path.rpartition('site-packages/')[2]}:{line}"
    return ""
