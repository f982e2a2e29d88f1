"""Text formatting: source locations removed from C++ messages, percentages, decimals and truncation."""

from __future__ import annotations

import pytest

from partita.observations.native_text import cut, without_signatures
from partita.observations.text_format import decimals, percent

GROUPS = (
    "/onnxruntime_src/onnxruntime/core/providers/partitioning_utils.cc:252 std::vector<std::vector<const "
    "onnxruntime::Node*> > onnxruntime::utils::{anonymous}::CreateSupportedPartitionNodeGroups(const "
    "onnxruntime::GraphViewer&, const onnxruntime::utils::IsNodeSupportedFn&, const std::unordered_map<const "
    "onnxruntime::Node*, const onnxruntime::NodeUnit*>*) "
)
LAMBDA = (
    "/onnxruntime_src/onnxruntime/core/framework/kernel_lookup.h:42 onnxruntime::common::Status onnxruntime::Lookup("
    "const std::function<void(int)>&)::<lambda(const onnxruntime::Node&)> const [with T = float; U = "
    "std::array<int, 3>] "
)
CALL = "D:\\a\\onnxruntime\\core\\session\\inference_session.cc:2585 onnxruntime::Session::operator ()(int) const "
BARE = (
    "/build/onnxruntime/core/providers/openvino/ov_interface.cc:56 onnxruntime::openvino_ep::OVCore::Read(bool) const "
)


@pytest.mark.parametrize("place", [GROUPS, LAMBDA, CALL, BARE, "a/b.hpp:7 bool a::operator==(const a&, const a&) "])
def test_source_location_is_removed_from_message(place: str):
    said = "num_nodes == in_degree.size() was false. Processed 3 nodes (of 8)"
    start = "Exception during initialization: "
    assert without_signatures(f"{start}{place}{said}") == f"{start}{said}"
    assert without_signatures(f"{place}[OpenVINO-EP] no {GROUPS}{said}") == f"[OpenVINO-EP] no {said}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing to cut",
        "model.py:12 (this is no signature) and stays",
        "see src/kernel.cc:40 for the kernels (there are two) that it has",
        GROUPS.strip(),
        "/core/graph.cc:12 onnxruntime::Graph::Resolve(int",
        "/core/graph.cc:12 onnxruntime::Graph::Resolve) done",
    ],
)
def test_text_without_signature_is_unchanged(text: str):
    assert without_signatures(text) == text


@pytest.mark.parametrize(
    ("part", "shown"),
    [(None, "-"), (0.0, "0.0 %"), (1e-5, "under 0.1 %"), (0.001, "0.1 %"), (0.9996, "over 99.9 %"), (1.0, "100.0 %")],
)
def test_percent_never_rounds_to_0_or_100(part: float | None, shown: str) -> None:
    assert percent(part) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (2.3e-05, "0.000023"), (0.0004, "0.00040"), (0.0412, "0.041"), (12.34, "12.3")]
)
def test_decimals_shows_small_values_as_nonzero(value: float, shown: str) -> None:
    assert decimals(value).startswith(shown)


@pytest.mark.parametrize("length", [299, 300, 301, 302, 1000, 20_000])
def test_cut_respects_length_and_preserves_both_ends(length: int) -> None:
    text = "first " + "x" * (length - 10) + "last"
    found = cut(text, 300)
    assert len(found) <= 300 and found.startswith("first ") and found.endswith("last")
    assert (found == text) is (length <= 300)
    assert length <= 300 or " … " in found
