"""Support tables: tests the forms of each operator first, newest versions first, then types and ranks.

Types are tested in a supported form if there is one, because otherwise the form could be the cause.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from partita.observations.facts import Outcome
from partita.providers.resolve import Resolution
from partita.runtime.lab.forms import Form, Types, assignments, distinct, forms, ir_version, plainest_forms, ranks
from partita.runtime.lab.graph import CannotProbeError, Graph, cut_graph, cut_proto
from partita.runtime.lab.laboratory import Cache, Lab
from partita.runtime.lab.placement import Placement
from partita.runtime.lab.schema import Operator, find_operator, operators, types_of
from partita.runtime.lab.variant import part_model, variant_model, zeros_needed
from partita.support import records as support

AT_ONCE = 64
"""Number of forms that are tested together."""


def measure(
    resolution: Resolution, selection: Mapping[str, Any], seconds: float, environment: Mapping[str, str] | None = None
) -> support.Measurements:
    """Test a provider for at most `seconds`. Ctrl-C ends the tests, and the answers so far count.

    `selection`: `operators`, a list of [domain, name] or None for all; or `model`, the path of an ONNX file.
    `environment`: of the worker process; None: that of this process.
    """
    began, interrupted, complete = time.monotonic(), False, False
    newest, error, table = None, "", Table({}, by_need=False)
    needs: tuple[support.ModelNeed, ...] = ()
    with Lab(resolution, Cache(None), began + seconds, environment) as lab:
        try:
            newest, error = newest_opset(lab)
            if newest is not None:
                requested, needs = find_requested(selection, newest)
                table = Table(requested, by_need=bool(needs))
                complete = table.fill(lab)
        except KeyboardInterrupt:
            interrupted = True
    measured = tuple(_measurement(form, table.answers.get(form)) for form in table.planned)
    return support.Measurements(
        results=measured,
        model_nodes=needs,
        without_example=tuple(_name_of(operator) for operator, listed in table.forms.items() if not listed),
        untested_counts=tuple(
            ((entry.domain, entry.name, entry.since), count) for entry, count in table.omitted.items()
        ),
        newest_opset=newest,
        sessions=lab.experiments,
        crashes=sum(answer.outcome == "crashed" for answer in measured),
        seconds=time.monotonic() - began,
        complete=complete,
        interrupted=interrupted,
        unusable=lab.unusable or error,
    )


class Table:
    """The answers of one provider for forms of operators, and the next forms to test.

    `requested`: operator versions, with the types of a model's nodes. `by_need`: test only these types.
    """

    def __init__(self, requested: Mapping[Operator, frozenset[Types]], *, by_need: bool) -> None:
        self.requested, self.by_need = requested, by_need
        self.forms = {
            operator: distinct(plainest_forms(operator) if by_need else forms(operator)) for operator in requested
        }
        self.planned: list[Form] = []
        self.answers: dict[Form, Placement] = {}
        self.omitted: dict[Operator, int] = {}
        """Number of type assignments that were not tested because of the limit."""

    def fill(self, lab: Lab) -> bool:
        """Test all forms; False if the time ran out."""
        for batch in self.batches():
            self.planned = [*batch, *self.planned]
            for part in (batch[start : start + AT_ONCE] for start in range(0, len(batch), AT_ONCE)):
                answers = lab.try_all([variant_model(form.build(), auxiliary=lab.compiles) for form in part])
                self.answers |= {form: answer for form, answer in zip(part, answers, strict=True) if answer is not None}
                if None in answers:
                    return False
        return True

    def batches(self) -> Iterator[list[Form]]:
        """Batches of forms, newest versions first; those of types and ranks depend on the outcomes of forms."""
        latest = set({(operator.domain, operator.name): operator for operator in self.requested}.values())
        newest = [operator for operator in self.requested if self.by_need or operator in latest]
        for group in (newest, [operator for operator in self.requested if operator not in newest]):
            yield [form for operator in group for form in self.forms[operator]]
            yield [form for operator in group for form in self.typed(operator)]
        if not self.by_need:
            yield [form for operator in newest if (best := self.best(operator)) for form in ranks(best)]

    def best(self, operator: Operator) -> Form | None:
        """The first supported form, else the first legal form."""
        known = [(form, self.answers.get(form)) for form in self.forms[operator]]
        supported = (form for form, answer in known if answer is not None and _outcome(answer) == "supported")
        legal = (form for form, answer in known if answer is None or answer.outcome != "invalid")
        return next(supported, None) or next(legal, None)

    def typed(self, operator: Operator) -> Iterator[Form]:
        """The best form with every type assignment."""
        best = self.best(operator)
        listed, more = assignments(best) if best is not None else ([], 0)
        if more:
            self.omitted[operator] = more
        for types in listed:
            if best is not None and (not self.by_need or _is_needed(types, self.requested[operator])):
                yield replace(best, types=types, kind="types")


def _measurement(form: Form, answer: Placement | None) -> support.Measurement:
    """The table's answer for a form; untested without one."""
    return support.Measurement(
        domain=form.operator.domain,
        operator=form.operator.name,
        since=form.operator.since,
        until=form.operator.until,
        kind=cast("support.Kind", form.kind),
        types=form.types,
        difference=form.note,
        factors=form.factors,
        outcome="untested" if answer is None else _outcome(answer),
        message="" if answer is None else answer.message,
        replaced=answer is not None and answer.replaced_by in ("function", "nothing"),
    )


def _outcome(answer: Placement) -> support.Outcome:
    """The outcome as shown in a table: a timeout counts as a crash, and a kernel of another type as unsupported."""
    if answer.outcome == "timed_out":
        return "crashed"
    return "rejected" if answer.replaced_by == "casts" else cast("support.Outcome", answer.outcome)


def _is_needed(types: Types, needed: Collection[Types]) -> bool:
    """Whether an assignment occurs in a model, whose types may be partly unknown."""
    given = dict(types)
    return any(all(given.get(name, kind) == kind for name, kind in entry) for entry in needed)


# --- selection of operators ----------------------------------------------------------------------------------------


def find_requested(
    selection: Mapping[str, Any], opset: int
) -> tuple[Mapping[Operator, frozenset[Types]], tuple[support.ModelNeed, ...]]:
    """The operator versions to test, with their types and counts in a model. `selection`: see `measure`."""
    known = [entry for entry in operators() if entry.domain != "" or entry.since <= opset]
    if selection.get("model"):
        needed = _needs_of(Path(selection["model"]), set(known))
        needs = tuple(
            support.ModelNeed(
                domain=operator.domain, operator=operator.name, since=operator.since, types=dict(types), nodes=nodes
            )
            for operator, counted in needed.items()
            for types, nodes in counted.items()
        )
        return {operator: frozenset(counted) for operator, counted in needed.items()}, needs
    named = selection.get("operators")
    chosen = (entry for entry in known if named is None or [entry.domain, entry.name] in named)
    return dict.fromkeys(chosen, frozenset()), ()


def _name_of(operator: Operator) -> str:
    """Name with version, e.g. com.microsoft:Attention-1."""
    domain = f"{operator.domain}:" if operator.domain else ""
    return f"{domain}{operator.name}-{operator.since}"


def newest_opset(lab: Lab) -> tuple[int | None, str]:
    """The newest ONNX opset that this ONNX Runtime opens, or None and the error of the oldest."""
    import onnx

    error = ""
    for opset in range(onnx.defs.onnx_opset_version(), 0, -1):
        head = f'<ir_version: {ir_version(opset)}, opset_import: ["": {opset}]>'
        model = onnx.parser.parse_model(f"{head} opset (float[1] x) => (float[1] y) {{ y = Neg(x) }}")
        (answer,) = lab.try_all([model], one_node=False)
        if answer is None or answer.outcome != "invalid":
            return (None if answer is None else opset), ""
        error = answer.message
    return None, error


def _needs_of(path: Path, known: Collection[Operator]) -> dict[Operator, Counter[Types]]:
    """Number of a model's nodes per operator version and types."""
    from partita.runtime.place.onnx_model import read_onnx

    graph = cut_graph(read_onnx(path), {})
    kinds = {**graph.fixed, **graph.types}
    versions = {entry.domain: entry.version for entry in graph.proto.opset_import}
    found: dict[Operator, Counter[Types]] = {}
    for node in graph.nodes.values():
        operator = find_operator(node.domain, node.op_type, versions.get(node.domain, 1))
        if operator is not None and operator in known:
            types = tuple(types_of(node, operator, kinds).items())
            found.setdefault(operator, Counter())[types] += 1
    return found


# --- graphs during export --------------------------------------------------------------------------------------------

Sizes = Mapping[str, tuple[int, ...]]
UNSUPPORTED: frozenset[Outcome] = frozenset({"rejected", "failed", "crashed"})
"""Outcomes that mean the provider does not support a node. A crash counts, because it repeated in a fresh process. A
timeout may be caused by the machine, and an invalid variant by the experiment."""
WHOLE_LIMIT_BYTES = 1 << 30
"""Maximum bytes of weights (as zeros) of a graph that is opened as a whole."""


def measure_graph(model: bytes, sizes: Sizes, lab: Lab) -> tuple[int, dict[str, int], str, int]:
    """Test a model without its weights. `sizes`: of its inputs in the tested step.

    Returns:
        The number of nodes; unsupported nodes (tested alone), by operator; the provider's error message for the whole
        graph, empty if it opens or was not tested; and the number of nodes without an answer.
    """
    import onnx

    graph = cut_proto(onnx.ModelProto.FromString(model), Path(), sizes)
    left, untested = Counter[str](), 0
    answers = lab.try_nodes((graph, name) for name in graph.nodes)
    for node, answer in zip(graph.nodes.values(), answers, strict=True):
        if answer is not None and answer.outcome in UNSUPPORTED:
            left[node.op_type] += 1
        else:
            untested += answer is None or answer.outcome != "supported"
    return len(graph.nodes), dict(left), "" if left else _failure_over(graph, lab), untested


def supports_each(models: Sequence[tuple[bytes, Sizes]], lab: Lab) -> list[bool]:
    """For each model of one node, whether the provider supports it other than as its function's nodes."""
    import onnx

    graphs = [cut_proto(onnx.ModelProto.FromString(model), Path(), sizes) for model, sizes in models]
    answers = lab.try_nodes((graph, next(iter(graph.nodes))) for graph in graphs)
    return [answer is not None and answer.is_supported for answer in answers]


def _failure_over(graph: Graph, lab: Lab) -> str:
    """The provider's error for the whole graph; empty if it opens or the graph is too large."""
    try:
        model = part_model(graph)
    except CannotProbeError:
        return ""
    answer = lab.try_all([model], one_node=False)[0] if zeros_needed([model]) <= WHOLE_LIMIT_BYTES else None
    failed = answer is not None and answer.outcome in UNSUPPORTED - {"rejected"}
    return answer.message or answer.outcome if answer is not None and failed else ""
