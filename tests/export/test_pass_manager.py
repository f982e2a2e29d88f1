"""Errors name the pass that failed or broke an invariant; passes can be disabled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from partita.cli import run as command_line
from partita.errors import UnsupportedModelError, UsageError
from partita.export import passes
from partita.export.options import ExportOptions, check_options
from partita.export.passes.base import Pass, TracedGraph
from partita.export.passes.manager import PassError
from partita.package.folder import read_manifest
from tests.conftest import REPOSITORY, TinyCheckpoint
from tests.export.nets import run_passes
from tests.export.test_passes import NOTHING_KNOWN, graph, value
from tools.passes_page import main, page


def model() -> ir.Model:
    """x -> Neg -> Abs -> out, every node and value with a name."""
    x = value("x", [2, 3])
    first = ir.node("Neg", [x], name="layer/Neg")
    second = ir.node("Abs", [first.outputs[0]], name="layer/Abs")
    first.outputs[0].name = "middle"
    made = graph([x], [first, second], [])
    made.graph.outputs[0].shape = ir.Shape([2, 3])
    return made


def fails(traced: TracedGraph) -> int:
    raise AssertionError("no Abs")


def retypes(traced: TracedGraph) -> int:
    traced.graph.outputs[0].dtype = ir.DataType.FLOAT16
    return 1


def drops_an_output(traced: TracedGraph) -> int:
    traced.graph.outputs.clear()
    return 1


def removes_what_is_read(traced: TracedGraph) -> int:
    traced.graph.remove(traced.graph[0])
    return 1


def reads_too_early(traced: TracedGraph) -> int:
    first = traced.graph[0]
    traced.graph.remove(first)
    traced.graph.append(first)
    return 1


def reads_itself(traced: TracedGraph) -> int:
    first, second = traced.graph
    first.replace_input_with(0, second.outputs[0])
    return 1


def reads_outside_in_a_subgraph(traced: TracedGraph) -> int:
    stranger = value("stranger", [2, 3])
    inner = ir.node("Neg", [stranger], name="inner")
    body = ir.Graph([], inner.outputs, nodes=[inner], name="body")
    condition = ir.Value(name="yes", type=ir.TensorType(ir.DataType.BOOL), const_value=ir.tensor(np.array(True)))
    traced.graph.initializers["yes"] = condition
    branches = {"then_branch": ir.AttrGraph("then_branch", body)}
    traced.graph.append(ir.node("If", [condition], branches, name="choice"))
    return 1


def test_pass_error_names_failed_pass() -> None:
    with pytest.raises(PassError, match="pass fails failed: AssertionError: no Abs; ") as caught:
        run_passes(model(), [Pass("fails", fails)], NOTHING_KNOWN)
    assert caught.value.exit_code == 1
    assert isinstance(caught.value.__cause__, AssertionError), "--debug shows what failed"


def test_unsupported_model_error_of_pass_is_not_wrapped() -> None:
    def refuses(traced: TracedGraph) -> int:
        raise UnsupportedModelError("no such model")

    with pytest.raises(UnsupportedModelError, match="no such model"):
        run_passes(model(), [Pass("refuses", refuses)], NOTHING_KNOWN)


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (retypes, "input or output out .*FLOAT.* changed to out .*FLOAT16"),
        (drops_an_output, "number of inputs and outputs changed from 2 to 1"),
        (removes_what_is_read, r"node 'layer/Abs' \(Abs\) reads 'middle', which no earlier node produces"),
        (reads_itself, "ValueError: .*cycle"),
        (reads_outside_in_a_subgraph, r"node 'inner' \(Neg\) reads 'stranger'"),
    ],
)
def test_broken_pass_invariant_raises_pass_error(breaks: Callable[[TracedGraph], int], said: str) -> None:
    with pytest.raises(PassError, match=f"pass {breaks.__name__} failed: .*{said}"):
        run_passes(model(), [Pass(breaks.__name__, breaks)], NOTHING_KNOWN)


def test_nodes_are_sorted_topologically_after_pass() -> None:
    made = model()
    assert run_passes(made, [Pass("one", reads_too_early)], NOTHING_KNOWN) == {"one": 1}
    assert [node.name for node in made.graph] == ["layer/Neg", "layer/Abs"]


def test_failed_pass_prints_single_line_and_writes_no_package(
    tiny_checkpoint: TinyCheckpoint,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails_over_a_product(traced: TracedGraph) -> int:
        assert traced.input("tokens") is not None and len(traced.states) == 4
        raise IndexError("list index out of range")

    monkeypatch.setattr(passes, "ORDER", (*passes.ORDER, Pass("broken", fails_over_a_product)))
    out = tmp_path_factory.mktemp("broken") / "package"
    code = command_line(["export", str(tiny_checkpoint("llama")), str(out), "--attention", "gqa", "--no-verify"])

    line = capsys.readouterr().err.splitlines()[-1]
    assert code == 1 and not out.exists()
    assert line.startswith("partita: pass broken failed: IndexError: list index out of range; this is a bug in")


def test_disabled_passes_are_skipped_and_recorded(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the manifest and in --explain."""
    package = tmp_path / "package"
    arguments = ["export", str(tiny_checkpoint("llama")), str(package), "--attention", "gqa", "--max-length", "64"]
    arguments += ["--without-pass", "fused_norms", "--without-pass", "activations", "--no-verify", "--explain"]
    assert command_line(arguments) == 0
    told = capsys.readouterr().out
    assert all(re.search(rf"^ +0 {name} +disabled$", told, re.MULTILINE) for name in ("fused_norms", "activations"))
    manifest = read_manifest(package)
    assert manifest.graph.without_passes == ("fused_norms", "activations")
    found = {node.op_type for node in onnx.load(package / "model.onnx", load_external_data=False).graph.node}
    assert not found & {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "QuickGelu"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fused_norm", r"`without_pass=fused_norm`: unknown pass; choose one of rotary_tables, .*fused_norms"),
        ("write_after_read", r"`without_pass=write_after_read`: without it, graphs may compute wrong values; choose"),
    ],
)
def test_invalid_without_pass_value_is_rejected(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_options(ExportOptions("checkpoint", Path("package"), without_pass=(name,)))


# docs/passes.md is what the passes say of themselves, and `export --explain` says the same in a line each


def test_passes_page_is_up_to_date(tmp_path: Path) -> None:
    main(tmp_path)
    written = (tmp_path / "passes.md").read_text(encoding="utf-8")
    assert written == page()
    current = (REPOSITORY / "docs" / "passes.md").read_text(encoding="utf-8")
    assert current == written, "write it again with: python -m tools.passes_page docs"
