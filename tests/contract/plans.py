"""Two placement reports compared node by node: what a dry run said, and what a session on the device did."""

from __future__ import annotations

from typing import Any

Report = dict[str, Any]


def differences(real: Report, dry: Report) -> list[str]:
    """What the reports do not agree on: nodes and their providers, Memcpy nodes and their bytes, where the cache is."""
    found: list[str] = []
    ran, foretold = ({phase["name"]: phase for phase in report["phases"]} for report in (real, dry))
    if ran.keys() != foretold.keys():
        return [f"phases: {sorted(ran)} ran, {sorted(foretold)} in the dry run"]
    for name, phase in ran.items():
        found += [f"{name}: {line}" for line in unlike(nodes_of(phase), nodes_of(foretold[name]), "node")]
        found += [f"{name}: {line}" for line in unlike(copies_of(phase), copies_of(foretold[name]), "copy")]
    if real["cache"] and real["cache"]["memories"] != dry["cache"]["memories"]:
        found.append(f"cache: {real['cache']['memories']} really, {dry['cache']['memories']} in the dry run")
    return found


def nodes_of(phase: Report) -> dict[str, Any]:
    """Provider by node. The numbers in the names of Memcpy nodes are not told apart: their order is the plan's own."""
    return {node["name"]: node["provider"] for node in phase["nodes"] if not node["name"].startswith("Memcpy")}


def copies_of(phase: Report) -> dict[str, Any]:
    """Bytes by direction and tensor, or by port, of every copy."""
    return {
        f"{copy['direction']} {copy.get('tensor') or copy['name']}": copy["bytes_per_run"] for copy in phase["copies"]
    }


def unlike(real: dict[str, Any], dry: dict[str, Any], what: str) -> list[str]:
    """A line for each entry that is in one only, or has another value."""
    return [
        f"{what} {name}: {real.get(name, 'absent')} really, {dry.get(name, 'absent')} in the dry run"
        for name in sorted(real.keys() | dry.keys())
        if real.get(name, "absent") != dry.get(name, "absent")
    ]
