"""Probing of the target provider during export: order of probes, ranking, verification and records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from partita.errors import ParityError, UnsupportedModelError
from partita.export.pipeline import ExportOptions, export
from partita.export.publish import ExportResult
from partita.export.target import ProbeResult, Target, candidates, describe, rank, usual
from partita.library.exporting import replay as replay_on_cpu
from partita.package.folder import Manifest, read_manifest
from partita.package.records import ProbedLowering, TargetRecord, Verification
from tests.conftest import TinyCheckpoint

SPOILS = {"gqa": "GroupQueryAttention", "onnx24": "TensorScatter", "primitives": "ScatterElements"}
"""An operator that only this lowering has."""


def name_of(model: bytes) -> str:
    """The lowering of a graph that a provider is asked about."""
    operators = {node.op_type for node in onnx.ModelProto.FromString(model).graph.node}
    (name,) = [name for name, operator in SPOILS.items() if operator in operators]
    return name


class Provider:
    """A provider by its answers: what it leaves of each lowering, and which it computes wrongly."""

    def __init__(self, left: Mapping[str, int], wrong: tuple[str, ...] = ()) -> None:
        self.left, self.wrong = left, wrong
        self.asked: list[str] = []
        self.sizes: list[Mapping[str, tuple[int, ...]]] = []
        self.replayed: list[str] = []

    def ask(self, model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> ProbeResult:
        name = name_of(model)
        self.asked.append(name)
        self.sizes.append(sizes)
        count = self.left.get(name, 0)
        return ProbeResult(
            len(onnx.ModelProto.FromString(model).graph.node), {SPOILS[name]: count} if count else {}, ""
        )

    def replay(self, folder: Path, manifest: Manifest) -> Verification:
        assert (folder / "model.onnx").is_file() and not (folder / "manifest.json").exists()
        name = manifest.graph.attention
        self.replayed.append(name)
        if name in self.wrong:
            return Verification(status="unverified", detail="first difference in prefill, output logits")
        return Verification(status="verified", detail="10 steps match")

    def target(self, preferred: str = "gqa") -> Target:
        return Target("there", "--target", preferred, "directly", self.ask, self.replay)


Exporting = Callable[..., ExportResult]


@pytest.fixture
def exporting(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Exporting:
    """Export a tiny llama of one layer for a target."""

    def run(
        target: Target | None, model: str = "llama", overrides: dict[str, Any] | None = None, **options: Any
    ) -> ExportResult:
        checkpoint = tiny_checkpoint(model, **{"num_hidden_layers": 1, **(overrides or {})})
        wanted = ExportOptions(str(checkpoint), tmp_path / "out", max_length=64, **options)
        return export(wanted, replay=replay_on_cpu, target=target)

    return run


def test_fully_supported_lowering_ends_probing(exporting: Exporting) -> None:
    provider = Provider({})
    summary = exporting(provider.target())
    assert provider.asked == provider.replayed == ["gqa"]
    assert summary.manifest.graph.attention == "gqa"
    nodes = summary.manifest.graph.files[0].nodes
    assert summary.attention_reason == f"auto: there supports {nodes} of {nodes} nodes"
    probed = ProbedLowering(attention="gqa", nodes=nodes, unsupported={}, error="", untested_nodes=0, mismatch="")
    assert read_manifest(summary.path).target == TargetRecord(
        provider="there",
        source="--target",
        probe_method="directly",
        verification="verified",
        detail="10 steps match",
        probed=(probed,),
    )


def test_preferred_lowering_is_probed_first_and_fewest_unsupported_nodes_win(exporting: Exporting) -> None:
    provider = Provider({"primitives": 1, "gqa": 2, "onnx24": 6})
    summary = exporting(provider.target("onnx24"))
    assert provider.asked == ["onnx24", "gqa", "primitives"] and provider.replayed == ["primitives"]
    assert summary.manifest.graph.attention == "primitives"
    assert "onnx24 supports" in summary.attention_reason and "not TensorScatter (6)" in summary.attention_reason
    target = summary.manifest.target
    assert target is not None
    found = [(entry.attention, sum(entry.unsupported.values())) for entry in target.probed]
    assert found == [("onnx24", 6), ("gqa", 2), ("primitives", 1)]


def test_probe_model_takes_one_token_and_keeps_weights_external(exporting: Exporting) -> None:
    provider, kinds = Provider({}), list[bool]()

    def ask(model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> ProbeResult:
        weights = [t for t in onnx.ModelProto.FromString(model).graph.initializer if t.name.startswith("model.layers")]
        kinds.extend(t.data_location == onnx.TensorProto.EXTERNAL for t in weights)
        return provider.ask(model, sizes)

    exporting(replace(provider.target(), ask=ask))
    assert kinds and all(kinds)
    (sizes,) = provider.sizes
    assert sizes["input_ids"] == (1, 1) and sizes["past_key_values.0.key"] == (1, 2, 64, 16)


def test_mismatched_lowering_is_rejected_and_others_are_probed(exporting: Exporting) -> None:
    provider = Provider({"onnx24": 6}, wrong=("gqa",))
    summary = exporting(provider.target())
    assert provider.asked == ["gqa", "onnx24", "primitives"], "the others were asked only after gqa had disagreed"
    assert provider.replayed == ["gqa", "primitives"]
    assert summary.manifest.graph.attention == "primitives" and summary.manifest.verification.status == "verified"
    assert "gqa does not match: first difference" in summary.attention_reason
    assert any(note.startswith("`attention=gqa` was tried and rejected: first difference") for note in summary.notes)
    target = summary.manifest.target
    assert target is not None and [bool(entry.mismatch) for entry in target.probed] == [True, False, False]
    assert sorted(path.name for path in summary.path.iterdir()) == sorted(
        [*(file.name for file in summary.manifest.files), "manifest.json"]
    )


def test_export_fails_if_every_lowering_mismatches(exporting: Exporting, tmp_path: Path) -> None:
    provider = Provider({}, wrong=tuple(SPOILS))
    with pytest.raises(ParityError, match="there does not match the source model") as caught:
        exporting(provider.target())
    assert caught.value.exit_code == 4 and provider.replayed == list(SPOILS)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ParityError, match="choose another `attention` or another `target`"):
        exporting(provider.target(), attention="gqa")


def test_requested_lowering_is_used_despite_unsupported_nodes(exporting: Exporting) -> None:
    provider = Provider({"onnx24": 6})
    summary = exporting(provider.target(), attention="onnx24")
    assert provider.asked == ["onnx24"] and summary.manifest.graph.attention == "onnx24"
    assert summary.attention_reason.startswith("requested: there supports ")


@pytest.mark.heavy
def test_opset_excludes_lowerings_requiring_newer_opset(exporting: Exporting) -> None:
    provider = Provider({"gqa": 1})
    summary = exporting(provider.target(), opset=18)
    assert provider.asked == ["gqa", "primitives"] and summary.manifest.graph.attention == "primitives"
    assert "onnx24: `opset=18`: onnx24 needs opset 24 or newer" in summary.attention_reason
    target = summary.manifest.target
    assert target is not None and target.excluded == {"onnx24": "`opset=18`: onnx24 needs opset 24 or newer"}


def test_lowering_unsupported_by_model_is_skipped_with_reason(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gqa lowering is replaced with a stub that rejects the model."""
    from partita.export.trace.attention import gqa

    def emit(call: Any) -> Any:
        raise UnsupportedModelError("layer 0 has something that gqa cannot write")

    monkeypatch.setattr(gqa, "LOWERING", replace(gqa.LOWERING, fused_call=emit))
    provider = Provider({})
    summary = exporting(provider.target())
    assert provider.asked == ["onnx24"]
    assert "gqa: layer 0 has something that gqa cannot write" in summary.attention_reason
    with pytest.raises(UnsupportedModelError, match="layer 0 has something"):
        exporting(provider.target(), attention="gqa", force=True)


def test_target_is_not_verified_without_replay_or_verify(exporting: Exporting) -> None:
    provider = Provider({})
    for target, options in ((replace(provider.target(), replay=None), {}), (provider.target(), {"verify": False})):
        record = exporting(target, force=True, **options).manifest.target
        assert record is not None and record.verification == "not_run" and provider.replayed == []


def test_target_without_probe_uses_its_default_lowering(exporting: Exporting) -> None:
    how = "which could not be probed: not_in_build: no such provider"
    summary = exporting(Target("there", "--target", "primitives", how))
    assert summary.manifest.graph.attention == "primitives"
    assert summary.attention_reason == f"auto: the default for there, {how}"
    target = summary.manifest.target
    assert target is not None and (target.probed, target.probe_method) == ((), how)


def test_ranking_orders_by_unsupported_nodes_failures_and_untested_nodes() -> None:
    order = candidates("primitives", "auto")
    primitives, gqa, onnx24 = order
    assert order == [usual("primitives"), usual("gqa"), usual("onnx24")]
    answers = {
        primitives: ProbeResult(100, {}, "cannot compile"),
        gqa: ProbeResult(50, {"GroupQueryAttention": 2}, ""),
        onnx24: ProbeResult(60, {}, "", untested=2),
    }
    assert rank(answers, order) == [onnx24, gqa, primitives]
    equals = {way: replace(answers[onnx24], untested=count) for way, count in zip(order, (60, 9, 1), strict=True)}
    assert rank(equals, order) == [gqa, onnx24, primitives], "of equals the one that was asked first"
    assert describe(answers[primitives]) == "fails on the whole graph: cannot compile"
    assert describe(answers[gqa]) == "supports 48 of 50 nodes, not GroupQueryAttention (2)"
    assert describe(answers[onnx24]) == "supports 58 of 60 nodes; no answer for 2"


class CountsExperts(Provider):
    """It records the number of MoE operators of a graph, and takes them or not."""

    takes_experts = True

    def ask(self, model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> ProbeResult:
        answer = super().ask(model, sizes)
        count = [node.op_type for node in onnx.ModelProto.FromString(model).graph.node].count("MoE")
        self.asked[-1] += f" {count}"
        refused = {"MoE": 1} if count and not self.takes_experts else {}
        return replace(answer, unsupported={**answer.unsupported, **refused})


def operators_of(summary: ExportResult) -> set[str]:
    assert summary.manifest.verification.status == "verified"
    return {node.op_type for node in onnx.load(summary.path / "model.onnx", load_external_data=False).graph.node}


def probed_by(summary: ExportResult) -> list[tuple[str, str | None, dict[str, int]]]:
    """The probed lowerings with the form of experts and the unsupported operators."""
    target = summary.manifest.target
    assert target is not None
    return [(entry.attention, entry.form, dict(entry.unsupported)) for entry in target.probed]


@pytest.mark.heavy
def test_experts_use_standard_operators_if_target_rejects_moe(exporting: Exporting) -> None:
    provider = CountsExperts({"onnx24": 6, "primitives": 3})
    provider.takes_experts = False
    summary = exporting(provider.target(), "mixtral")
    assert provider.asked == ["gqa 1", "gqa 0"], "gqa is asked about once more, with experts in standard operators"
    assert summary.manifest.graph.attention == "gqa" and "MoE" not in operators_of(summary)
    assert probed_by(summary) == [("gqa", None, {"MoE": 1}), ("gqa", "standard", {})]
    assert "; gqa supports " in summary.attention_reason and "not MoE (1)" in summary.attention_reason


@pytest.mark.heavy
def test_moe_operator_is_used_with_standard_attention_if_supported(exporting: Exporting) -> None:
    provider = CountsExperts({"gqa": 6})
    summary = exporting(provider.target(), "mixtral")
    assert provider.asked == ["gqa 1", "onnx24 0", "onnx24 1"], "in both forms, as standard attention has either"
    assert summary.manifest.graph.attention == "onnx24" and {"Attention", "MoE"} <= operators_of(summary)
    forms = [(attention, form) for attention, form, _ in probed_by(summary)]
    assert forms == [("gqa", None), ("onnx24", None), ("onnx24", "contrib")]
