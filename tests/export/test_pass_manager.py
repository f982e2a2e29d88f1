"""Errors name the pass that failed; passes can be disabled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from partita.cli import run as command_line
from partita.errors import UnsupportedModelError, UsageError
from partita.export import drafts, passes
from partita.export.options import ExportOptions, check_options
from partita.export.passes.base import Pass, TracedGraph
from partita.export.passes.manager import PassError
from partita.package.folder import read_manifest
from tests.conftest import REPOSITORY, TinyCheckpoint
from tests.export.nets import Net, context, run_passes
from tools.passes_page import page


def model() -> ir.Model:
    """x -> Neg -> Abs -> out."""
    net = Net()
    net.outputs.append(net.op("Abs", net.op("Neg", net.input("x", [2, 3]))))
    return net.model()


def fails(traced: TracedGraph) -> int:
    raise AssertionError("no Abs")


def refuses(traced: TracedGraph) -> int:
    raise UnsupportedModelError("no such model")


def reads_itself(traced: TracedGraph) -> int:
    first, second = traced.graph
    first.replace_input_with(0, second.outputs[0])
    return 1


@pytest.mark.parametrize(
    ("breaks", "error", "said"),
    [
        (fails, PassError, "pass fails failed: AssertionError: no Abs; this is a bug in Partita"),
        (reads_itself, PassError, "pass reads_itself failed: ValueError: .*cycle"),
        (refuses, UnsupportedModelError, "^no such model$"),
    ],
)
def test_error_of_pass_names_it_unless_it_is_partitas_own(
    breaks: Callable[[TracedGraph], int], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        run_passes(model(), [Pass(breaks.__name__, breaks)], context("none"))


def test_failed_pass_prints_single_line_and_writes_no_package(
    tiny_checkpoint: TinyCheckpoint,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails_over_a_product(traced: TracedGraph) -> int:
        assert traced.input("tokens") is not None and len(traced.states) == 4
        raise IndexError("list index out of range")

    monkeypatch.setattr(drafts, "ORDER", (*passes.ORDER, Pass("broken", fails_over_a_product)))
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


def test_passes_page_is_up_to_date() -> None:
    current = (REPOSITORY / "docs" / "passes.md").read_text(encoding="utf-8")
    assert current == page(), "write it again with: python -m tools.passes_page docs"
