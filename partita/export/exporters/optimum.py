"""optimum's exporter, in an environment of its own: for what the native one refuses, or to compare the two.

What it writes has the growing layout: every step copies the whole cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from partita.errors import UsageError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.weight_files import few
from partita.export.exporters.base import Exported, Exporter
from partita.export.optimum import environment
from partita.export.optimum.configs import view_for_4
from partita.export.optimum.graphs import contract_of, load, vocabulary, weights_of
from partita.export.options import WINDOW, ExportOptions, max_length
from partita.export.progress import stage
from partita.export.target import Target
from partita.export.verify import known_answer
from partita.export.work import Work
from partita.package.contract import Contract
from partita.package.records import TargetRecord, Verification

NAME = "optimum"
HOW = "for no lowering: optimum writes one graph for all"
HERE = ("fp32", "fp16")
"""Precisions that optimum writes for ONNX Runtime."""


@dataclass(slots=True)
class _Written:
    """The one graph that optimum wrote."""

    made: Exported
    versions: dict[str, str]
    target: Target | None
    tried: list[str] = field(default_factory=list)

    def best(self) -> Exported | None:
        """The graph, once."""
        return None if self.tried else self.made

    def set_aside(self, tried: Exported, detail: str, *, ran: bool) -> None:
        """There is nothing else to try."""
        self.tried.append(detail)

    def left_out(self) -> list[str]:
        """What was wrong with it."""
        return [f"{NAME} {detail}" for detail in self.tried]

    def reason(self, taken: Exported) -> str:
        """By what it was written."""
        told = " ".join(f"{name} {self.versions[name]}" for name in ("optimum-onnx",) if name in self.versions)
        return f"exported by {told or NAME} with transformers {self.versions.get('transformers', 'unknown')}, growing"

    def record(self, result: Verification | None) -> TargetRecord | None:
        """The target was asked nothing, and the answer may have been replayed there."""
        if self.target is None:
            return None
        return TargetRecord(
            provider=self.target.provider,
            source=self.target.source,
            how=HOW,
            asked=(),
            unfit={},
            verification="not_run" if result is None else result.status,
            detail="" if result is None else result.detail,
        )

    def others(self) -> Sequence[_Written]:
        """None: it writes one graph."""
        return ()


def _attempts(checkpoint: Checkpoint, work: Work, target: Target | None) -> _Written:
    """Have optimum export the checkpoint. Raises UsageError, UnsupportedModelError, InstallationError."""
    options = work.options
    if checkpoint.file is not None:
        raise UsageError(f"{checkpoint.where}: `exporter={NAME}` reads no GGUF file; leave it out")
    if checkpoint.absent:
        listed = f"the index of the weight files lists {few(checkpoint.absent)}, which no shard holds"
        raise UsageError(f"{checkpoint.where}: {listed}; correct the index, or leave `exporter={NAME}` out")
    there, length = environment.required(), max_length(options, checkpoint)
    prefix = f"{work.folder.name}-optimum-"  # by which the next export knows what a killed one has left
    place = Path(work.cleanup.enter_context(tempfile.TemporaryDirectory(dir=work.folder.parent, prefix=prefix)))
    seen, out = place / "checkpoint", place / "out"
    seen.mkdir()
    out.mkdir()
    with stage(work.progress, "export", work.seconds, of=NAME):
        view = view_for_4(checkpoint.folder, seen)
        versions = there.export(view, out, checkpoint.model_type, options.precision, options.opset)
    model = load(out)
    size = vocabulary(model) or int(checkpoint.config.get_text_config(decoder=True).vocab_size)
    contract = contract_of(model, options.batch_size, length, size)
    return _Written(_exported(checkpoint, model, contract, versions, work), versions, target)


def _check(options: ExportOptions) -> None:
    """Refuse what optimum does not do. Raises UsageError."""
    said = f"`exporter={NAME}`"
    if options.precision not in HERE:
        raise UsageError(f"`precision={options.precision}`: {said} writes {' or '.join(HERE)}")
    others = {
        f"`cache={options.cache}`": options.cache == WINDOW,
        f"`attention={options.attention}`": options.attention not in ("auto", "growing"),
        "`static_shapes=True`": options.static_shapes,
        f"`cache_precision={options.cache_precision}`": options.cache_precision is not None,
        f"`activations={options.activations}`": options.activations is not None,
        "`without_pass`": bool(options.without_pass),
    }
    for other, given in others.items():
        if given:
            raise UsageError(f"{said} writes its own graph, without {other}; leave one of the two out")


def _exported(
    checkpoint: Checkpoint, model: ir.Model, contract: Contract, versions: Mapping[str, str], work: Work
) -> Exported:
    """The graph as it is handed over."""
    crossed = work.options.verify_length or known_answer.CROSSED_TOKENS
    count, size = weights_of(model)
    return Exported(
        label=f"`exporter={NAME}`",
        attention=NAME,
        checkpoint=checkpoint,
        models=(model,),
        contract=contract.model_copy(update={"weight_bytes": size}),
        parameters=count,
        original_parameters=count,
        answer=lambda: known_answer.compute(
            checkpoint, contract.vocab_size, contract.max_length, crossed=crossed, scratch=work.scratch
        ),
        unused=(),
        passes={},
        tools={name if NAME in name else f"{name} of {NAME}": version for name, version in versions.items()},
        caution="; the graph is optimum's; `exporter=native` writes Partita's own",
    )


EXPORTER = Exporter(NAME, "optimum's exporter, in an environment of its own", _attempts, check=_check)
