"""Another exporter is one file: what is written, verified and published needs no more than what it hands over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

import partita
from partita import cli
from partita.commands import completion
from partita.errors import ParityError, UsageError
from partita.export import pipeline
from partita.export.checkpoint.description import Checkpoint
from partita.export.exporters import Attempts, Exported
from partita.export.pipeline import ExportOptions, export
from partita.export.target import Target
from partita.export.verify import known_answer
from partita.export.work import Work
from partita.library.exporting import replay, smoke
from partita.package.contract import Contract
from partita.package.folder import check_files, read_manifest
from tests.conftest import TinyCheckpoint


class Found(Attempts):
    """The attempts of an exporter that traces nothing, and hands over graphs that lie in a folder."""

    target = None

    def __init__(self, checkpoint: Checkpoint, work: Work, target: Target | None) -> None:
        self.checkpoint, self.work, self.tried = checkpoint, work, list[str]()

    def best(self) -> Exported | None:
        if self.tried:
            return None
        folder = self.work.options.folder.parent / "ready"
        graph = read_manifest(folder).graph
        fields = {name: getattr(graph, name) for name in Contract.model_fields}
        return Exported(
            label="the graphs in ready",
            attention="theirs",
            checkpoint=self.checkpoint,
            models=tuple(ir.load(folder / file.file) for file in graph.files),
            contract=Contract(**fields),
            parameters=7,
            original_parameters=7,
            answer=lambda first: known_answer.compute(
                self.checkpoint, graph.vocab_size, graph.max_length, 8, first=first
            ),
            unused=("a tower",),
            passes={},
            caution="; ask those who wrote it",
        )

    def set_aside(self, tried: Exported, detail: str, *, ran: bool) -> None:
        self.tried.append(detail)

    def omitted(self) -> list[str]:
        return self.tried

    def reason(self, taken: Exported) -> str:
        return f"{taken.label}, as they are"


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it stand for optimum's exporter."""
    monkeypatch.setitem(pipeline.EXPORTERS, "optimum", Found)


def options(checkpoint: Path, out: Path, **more: Any) -> ExportOptions:
    return ExportOptions(str(checkpoint), out, max_length=64, **more)


@pytest.mark.usefixtures("another")
def test_graphs_of_another_exporter_are_written_verified_and_published(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """Its graphs have their weights in files of their own, as any ONNX file has."""
    checkpoint = tiny_checkpoint("llama")
    ours = export(options(checkpoint, tmp_path / "ready"), replay=replay, smoke=smoke)
    theirs = export(options(checkpoint, tmp_path / "out", exporter="optimum"), replay=replay, smoke=smoke)

    manifest = read_manifest(tmp_path / "out")
    check_files(tmp_path / "out", manifest, hashes=True)
    assert (manifest.verification.status, manifest.graph.attention) == ("verified", "theirs")
    assert manifest.graph.states == ours.manifest.graph.states and manifest.graph.files == ours.manifest.graph.files
    assert (manifest.source.parameters, manifest.source.unused) == (7, ("a tower",))
    assert theirs.attention_reason == "the graphs in ready, as they are"


@pytest.mark.usefixtures("another")
def test_what_it_knows_to_go_wrong_ends_the_error(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """The graphs of one checkpoint are no export of another."""
    export(options(tiny_checkpoint("llama"), tmp_path / "ready"), replay=replay)
    other = tiny_checkpoint("llama", tied=True)
    with pytest.raises(ParityError, match="does not match the source model: .*; ask those who wrote it"):
        export(options(other, tmp_path / "out", exporter="optimum"), replay=replay)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("another")
def test_a_user_names_an_exporter_on_the_command_line_and_in_a_program(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That `--exporter` reaches it shows in its own error: the graphs that it takes are not there."""
    checkpoint, out = str(tiny_checkpoint("llama")), str(tmp_path / "out")
    assert completion.exporters("") == ["native", "optimum"] and completion.exporters("op") == ["optimum"]
    assert cli.run(["export", checkpoint, out, "--exporter", "others"]) == 2
    assert "--exporter others: unknown exporter; choose one of native, optimum" in capsys.readouterr().err
    with pytest.raises(partita.ArgumentError, match="^`target_options` needs `target`, the provider it belongs to"):
        partita.export(checkpoint, out, target_options={"device_id": 1})
    with pytest.raises(partita.ArgumentError, match="`exporter=others`: unknown exporter; choose one of native, opt"):
        partita.export(checkpoint, out, exporter="others")
    assert cli.run(["export", checkpoint, out, "--max-length", "64", "--attention", "gqa"]) == 0
    (tmp_path / "out").rename(tmp_path / "ready")
    assert cli.run(["export", checkpoint, out, "--exporter", "optimum", "--max-length", "64"]) == 0
    assert read_manifest(tmp_path / "out").graph.attention == "theirs"


def test_an_unknown_exporter_is_refused(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mobius`: unknown exporter; choose one of native, optimum"):
        export(options(tiny_checkpoint("llama"), tmp_path / "out", exporter="mobius"), replay=replay)
