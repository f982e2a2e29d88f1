"""Graphs all of whose work is on the provider, or done before a run: a fallback that is reported is invented."""

from __future__ import annotations

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.graphs import OPSET, between, operators

LOCAL = f'<domain: "local", opset_import: ["" : {OPSET}]>'
TARGETS: tuple[tuple[str, str, bool], ...] = (
    ("main", "cuda", True),
    ("webgpu", "webgpu", False),
    ("openvino", "openvino", False),
    ("qnn", "qnn", False),
    ("plugins", "openvino", False),
)
"""Environment, provider, and whether it is a dry run."""
CONDITION = "bool yes={1}"
GRAPHS: dict[str, tuple[str, str]] = {
    "constants": (
        "a graph without an input, all of which is constant",
        operators(
            OPSET,
            "g () => (float[4,4] y) <float[4,4] a, float[4,4] b> {\n  [planted] c = Det(a)\n  d = Add(b, c)\n"
            "  [last] y = Relu(d)\n}",
        ),
    ),
    "constant-part": (
        "an operator that no provider has, over constants",
        between("[planted] d = Det(a)\n  p = Mul(h, d)", extra="float[4,4] a"),
    ),
    "dropout": ("a Dropout, which does nothing when it is not trained", between("[planted] p = Dropout(h)")),
    "same-type": ("a Cast to the type that its input has", between("[planted] p = Cast<to=1>(h)")),
    "identity": ("an Identity between two others", between("[planted] p = Identity(h)")),
    "known-shape": (
        "a Reshape to a shape that follows from one that is fixed",
        between(
            "[planted] s = Shape(h)\n  n = Gather<axis=0>(s, zero)\n  m = Unsqueeze(n, axis)\n"
            "  t = Concat<axis=0>(m, rest)\n  p = Reshape(h, t)",
            extra="int64 zero={0}, int64[1] axis={0}, int64[1] rest={-1}",
        ),
    ),
    "known-size": (
        "a tensor of a constant size, made in the graph",
        between("[planted] z = ConstantOfShape(s)\n  p = Add(h, z)", extra="int64[2] s={4,16}"),
    ),
    "known-condition": (
        "an If whose condition is constant",
        between(
            "[planted] p = If(yes)<then_branch = t () => (float[4,16] a) { [then] a = Relu(h) }, "
            "else_branch = e () => (float[4,16] b) { [else] b = Neg(h) }>",
            extra=CONDITION,
        ),
    ),
    "local-function": (
        "a function of the file, both of whose nodes the provider has",
        between("[planted] p = local.Part(h)").replace('"com.microsoft"', '"local" : 1, "com.microsoft"')
        + f"\n{LOCAL}\nPart (a) => (c) {{\n  [one] b = Sigmoid(a)\n  [two] c = Mul(a, b)\n}}",
    ),
}


def cases() -> tuple[Case, ...]:
    """Every graph on every provider."""
    return tuple(
        Case(
            f"{environment}-{provider}-{name}",
            environment,
            provider,
            planted,
            NO_FALLBACK,
            Run(text, dry_run=dry),
        )
        for environment, provider, dry in TARGETS
        for name, (planted, text) in GRAPHS.items()
    )


CASES = cases()
