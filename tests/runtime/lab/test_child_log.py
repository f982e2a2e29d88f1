"""What a provider says at VERBOSE of the one node of an experiment."""

from __future__ import annotations

import pytest

from partita.providers.resolve import known_providers
from partita.runtime.lab.placement import reason_in_log

QNN = known_providers()["qnn"].why_patterns


def unit(name: str, why: str) -> tuple[str, ...]:
    """A node unit that did not pass, as QNN 2.7.0 logs it."""
    head = (
        "[V:onnxruntime:, qnn_execution_provider.cc:1713 LogNodeSupport] Validation FAILED for 1 nodes in OrtNodeUnit"
    )
    return (f"{head} (Tile) :", f"\tOperator type: Tile Node name: {name} Node index: 1", f"\tREASON : {why}")


REFUSED = (
    "[W:onnxruntime:, qnn_model_wrapper.cc:565 CreateQnnNode] QNN.backendValidateOpConfig() failed for node `probe` "
)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (unit("probe", "Cannot get shape."), "Cannot get shape"),
        ((*unit("company", "not this one"), *unit("probe", "this one")), "this one"),
        (unit("company", "not this one"), ""),
        (
            (f"{REFUSED}of type `Relu` with error code 3110", *unit("probe", "Failed to add node.")),
            "QNN.backendValidateOpConfig() failed for `Relu` with error code 3110",
        ),
        (unit("probe", "Failed to add node."), "Failed to add node"),
        ((), ""),
    ],
)
def test_the_most_telling_sentence_about_the_node_is_kept(log: tuple[str, ...], said: str):
    assert reason_in_log(log, QNN) == said
