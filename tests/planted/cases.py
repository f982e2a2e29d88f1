"""Planted cases: graphs whose cause of a fallback is known, because the same graph without it is taken.

They are read from `data/*.toml`, a file per environment, and `shared.toml` for graphs that several environments run. A
case is a table `[<expected reason>.<name>]`. Its graph is in ONNX's text format (see `graphs.py`) or, with `like`, that
of another case of the file. The control is the graph after the replacements in `swap`, or the text `control`, in
`control_opset`, with the fields of `control_run`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tests.planted.graphs import NAMES, OPSET, operators

NO_FALLBACK = "no fallback"
"""Expected in place of a code where the provider has all of the graph, or nothing of it executes."""
Kind = Literal["logged", "probed", "derived"]
EVIDENCE: Mapping[str, tuple[Kind, ...]] = {
    # A log line says that no kernel was found, and never why: without an experiment these three cannot be told apart.
    "no_kernel_op": ("logged", "probed"),
    "no_kernel_version": ("probed", "derived"),
    "no_kernel_type": ("probed", "derived"),
    "attribute_unsupported": ("logged", "probed"),
    "dynamic_shape": ("logged", "probed"),
    "cpu_preferred": ("logged",),
    "subgraph_rejected": ("logged", "probed", "derived"),
    "over_budget": ("logged", "probed"),
    "option_needed": ("probed",),
    "runtime_inserted": ("derived",),
    "not_claimed": ("probed", "derived"),
}
"""Kinds of evidence that can prove a code; logged and derived for others."""
DATA = Path(__file__).with_name("data")
SHARED = "shared"


@dataclass(frozen=True)
class Run:
    """One way to run a graph: what is planted, or its control, depends on these alone."""

    model: str
    """Graph text, see `graphs.py`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the provider, by their own names."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process."""
    library: str = ""
    """A library to compile and to use in place of what is installed: what to define in PLUGIN, as NAME=VALUE."""
    dry_run: bool = False
    """Over stub CUDA libraries."""


@dataclass(frozen=True)
class Case:
    """A planted cause, and the one code that is right."""

    name: str
    environment: str
    """Of tests/contract/expectations.py."""
    provider: str
    """First of the chain; the CPU follows it."""
    planted: str
    """The cause, in words."""
    expected: str
    run: Run
    control: Run | None = None
    """The same without the cause: here `node` is taken. None where only another machine or wheel could show it."""
    node: str = "planted"
    """Name of the node; empty when it has none, and is told by `op_type`."""
    op_type: str = ""
    plain_node: str = ""
    """Name that plain ONNX Runtime lists it by, where it runs by another that it was given afterwards."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `partita place`."""
    evidence: tuple[Kind, ...] = ()
    """Kinds that are accepted; empty for those of EVIDENCE."""
    sentence: str = ""
    """Words of the provider's own that the evidence has to have."""
    plain: bool = True
    """Plain ONNX Runtime, asked for the same run, does not put the node on the provider either."""
    two_wheels: str = ""
    """Name and version of a second wheel of ONNX Runtime that the environment claims to have."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of evidence that are accepted."""
        return self.evidence or EVIDENCE.get(self.expected, ("logged", "derived"))

    @property
    def command(self) -> str:
        """What is run; cases that differ in the node alone share one run."""
        return repr((self.environment, self.provider, self.run, self.arguments, self.two_wheels))


DEFAULTS: Mapping[str, tuple[str, Run]] = {
    "main": ("cuda", Run("", dry_run=True)),
    "webgpu": ("webgpu", Run("")),
    "openvino": ("openvino", Run("")),
    "qnn": ("qnn", Run("", options={"soc_model": "43"})),
    "plugins": ("openvino", Run("")),
}
"""Provider of an environment, and how it runs, where a case does not say otherwise."""


def _with_header(text: str, opset: int) -> str:
    """The graph text with the header of its opset, unless it has one of its own."""
    plain = " ".join(text.split())
    return plain if plain.startswith("<ir_version") else operators(opset, plain)


def _case(environment: str, expected: str, name: str, row: dict[str, Any], table: Mapping[str, Any]) -> Case:
    """One case from its row. `table`: all rows of the file, by name."""
    provider, default = DEFAULTS[environment]
    source = table[row.get("like", name)]
    opset, text = source.get("opset", OPSET), " ".join(source["graph"].split())
    given = {key: row.pop(key) for key in ("options", "variables", "library", "dry_run") if key in row}
    run = replace(default, model=_with_header(text, opset), **given)
    control = None
    if row.keys() & {"swap", "control", "control_opset", "control_run"}:
        for old, new in row.get("swap", {}).items():
            assert old in text, f"{name}: {old!r} is not in its graph"
            text = text.replace(old, new)
        text = _with_header(row.get("control", text), row.get("control_opset", opset))
        control = replace(run, model=text, **row.get("control_run", {}))
    names = ("op_type", "plain_node", "arguments", "evidence", "sentence", "plain", "two_wheels")
    more: dict[str, Any] = {
        key: tuple(row[key]) if isinstance(row[key], list) else row[key] for key in names if key in row
    }
    node = row.get("node", "planted")
    return Case(
        name,
        environment,
        row.get("provider", provider),
        row["planted"],
        expected.replace("_", " ") if expected == "no_fallback" else expected,
        run,
        control,
        NAMES.get(node, node),
        **more,
    )


def _read(file: Path) -> Iterator[Case]:
    """All cases of a file."""
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    table = {name: row for rows in content.values() for name, row in rows.items()}
    for expected, rows in content.items():
        for name, row in rows.items():
            for environment in row.get("on", ()):
                yield _case(environment, expected, f"{environment}-{name}", row, {f"{environment}-{name}": row})
            if "on" not in row:
                yield _case(file.stem, expected, name, row, table)


CASES: tuple[Case, ...] = tuple(case for name in (*DEFAULTS, SHARED) for case in _read(DATA / f"{name}.toml"))
_FIRST = {(case.environment, case.expected): case.name for case in reversed(CASES)}
"""`make test` has the first case of each code in each environment."""
HEAVY: frozenset[str] = frozenset(case.name for case in CASES) - frozenset(_FIRST.values())
"""Names of the cases that only `make truth` and `make test-heavy` run."""
