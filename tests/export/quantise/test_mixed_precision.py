"""Mixed precision under a budget: cost of each weight, order of the steps, and the written package."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita.errors import ParityError, ResourceError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.naming import match_names
from partita.export.progress import Silent
from partita.export.quantise import Keep, mixed_precision
from partita.export.quantise.mixed_precision import FULL, Mixes, keep_of, units
from partita.export.quantise.plan import FORMS, Plan
from partita.export.quantise.reference import parameter_names
from partita.export.quantise.rewrite import PlacedWeight
from partita.export.quantise.weight_source import QuantisedSource
from partita.export.target import Kernels
from partita.export.verify import quality
from partita.export.verify.known_answer import load
from partita.export.verify.texts import Text
from partita.package.folder import QUALITY, WEIGHTS, read_manifest
from partita.package.records import PackedWeights, Quality
from tests.conftest import Exported, TinyCheckpoint
from tests.export.breadth import recipes
from tests.export.nets import float_source
from tests.export.quantise.test_precision import attributes, checked, export_to, nodes

ROOM = 20_000
"""Bytes for wider weights."""
PLAN = Plan(4, 32, "refit", Kernels(), FORMS["matmul_nbits"])
NAMES = tuple(f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("gate", "down"))


def placed(folder: Path, names: tuple[str, ...] = NAMES, plan: Plan = PLAN) -> list[PlacedWeight]:
    """Modules whose weights are packed."""
    found = []
    for name in names:
        source = float_source(open_checkpoint(str(folder)), f"{name}.weight")
        packing = plan.packing([name], source.origin.shape[1])
        assert packing is not None
        found.append(PlacedWeight(QuantisedSource.of(source, packing), (name,), ()))
    return found


def measured(model: Any, folder: Path, weights: list[PlacedWeight], plan: Plan = PLAN) -> Mixes:
    """The mixes of a model on random tokens."""
    checkpoint = open_checkpoint(str(folder))
    ids = np.random.Generator(np.random.PCG64(0)).integers(0, 60, (4, 64))
    names = parameter_names(model, match_names(model, checkpoint.tensors))
    with torch.no_grad():
        return Mixes(model, weights, names, plan, Text("text", "", ids), Silent())


def made(folder: Path, weights: list[PlacedWeight], plan: Plan = PLAN) -> Mixes:
    """The mixes of a tiny model on random tokens."""
    return measured(load(open_checkpoint(str(folder))), folder, weights, plan)


def test_measured_divergence_matches_applied_steps(tiny_checkpoint: TinyCheckpoint) -> None:
    found = made(tiny_checkpoint("llama"), placed(tiny_checkpoint("llama")))
    assert [bits for _, bits in found.steps] == [8] * 4 + [FULL] * 4
    costs = [cost for _, cost in found.costs]
    assert costs == sorted(costs, reverse=True) and min(costs) > 0
    with torch.no_grad():
        none, eight, all_of_it = found.measure(0), found.measure(4), found.measure(8)
    assert none.kl_mean > 10 * eight.kl_mean > 0 == pytest.approx(all_of_it.kl_mean, abs=1e-9)
    assert all_of_it.perplexity_ratio == pytest.approx(1, abs=1e-6)
    assert 0.4 < none.kl_mean / sum(costs) < 2.5, "what weights cost alone about adds up"
    found.tried.clear()
    with torch.no_grad():
        assert found.measure(0) == none, "weights go back and forth without a trace"


def test_modules_in_keep_are_excluded_from_the_search(tiny_checkpoint: TinyCheckpoint) -> None:
    plan = replace(PLAN, keep=(Keep("layers.0.mlp.down_proj", "int8"),))
    weights = placed(tiny_checkpoint("llama"), plan=plan)
    assert [unit.patterns for unit in units(weights, plan)] == [(name,) for name in (NAMES[0], *NAMES[2:])]
    found = made(tiny_checkpoint("llama"), weights, plan)
    assert keep_of(found.steps[:1]) == (Keep(found.steps[0][0].patterns[0], "int8"),)
    every = keep_of(found.steps[:6])
    assert {keep.precision for keep in every} == {"fp32"} and len(every) == 3


def test_tied_float_embedding_is_unchanged_if_head_is_quantised(tiny_checkpoint: TinyCheckpoint) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint("llama", tied=True)))
    model = load(checkpoint)
    source = float_source(checkpoint, "model.embed_tokens.weight")
    packing = PLAN.packing(["lm_head"], 64)
    assert packing is not None
    before = model.get_input_embeddings().weight.detach().clone()
    head = PlacedWeight(QuantisedSource.of(source, packing), ("lm_head",), ())
    with torch.no_grad():
        measured(model, tiny_checkpoint("llama", tied=True), [head]).measure(0)
    assert torch.equal(model.get_input_embeddings().weight.detach(), before)
    assert not torch.equal(model.get_output_embeddings().weight.detach(), before)


def packed_of(package: Path) -> PackedWeights:
    packed = checked(package).packed
    assert packed is not None
    return packed


def budgeted(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> tuple[Path, Path]:
    """A package in int4, and one that may take some bytes more."""
    checkpoint = tiny_checkpoint("llama", tied=True)
    base = exported(checkpoint, precision="int4", block_size=32)
    room = read_manifest(base).graph.weight_bytes + ROOM
    return base, exported(checkpoint, precision="int4", block_size=32, max_weight_size=room)


def test_max_weight_size_is_met_and_lowers_divergence(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    plain, package = budgeted(tiny_checkpoint, exported)
    base, manifest, mix = read_manifest(plain), read_manifest(package), packed_of(package).mix
    assert mix is not None and 0 < mix.applied_steps < mix.steps and mix.held_out and mix.tokens >= 256
    assert base.graph.weight_bytes < manifest.graph.weight_bytes <= base.graph.weight_bytes + ROOM
    bits = {attributes(node)["bits"] for node in nodes(package, "MatMulNBits").values()}
    assert bits == {4, 8}
    said = {tuple(sorted(entry.partition("=")[0] for entry in packed_of(package).keep))}
    assert said and all(entry.endswith("=int8") for entry in packed_of(package).keep)
    judged = {each.applied_steps: each for each in mix.measured}
    assert judged[mix.applied_steps].kl_mean < judged[0].kl_mean
    assert manifest.quality is not None and base.quality is not None
    assert manifest.quality.kl_mean < base.quality.kl_mean


def test_max_perplexity_ratio_is_met_with_minimal_steps(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    checkpoint = tiny_checkpoint("llama", tied=True)
    none = packed_of(budgeted(tiny_checkpoint, exported)[1]).mix
    assert none is not None
    divergence = next(each.kl_mean for each in none.measured if each.applied_steps == 0) / 2
    ratio = math.exp(divergence)
    package = exported(checkpoint, precision="int4", block_size=32, max_perplexity_ratio=ratio)
    manifest, mix = checked(package), packed_of(package).mix
    assert mix is not None and manifest.quality is not None and 0 < mix.applied_steps < mix.steps
    assert manifest.quality.perplexity_ratio <= ratio
    judged = {each.applied_steps: each.kl_mean for each in mix.measured}
    aim = mixed_precision.AIM * divergence
    assert judged[mix.applied_steps] <= aim < judged[mix.applied_steps - 1], (
        "one step fewer was measured, and is not enough"
    )


def test_unmet_perplexity_ratio_publishes_nothing(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = read_manifest(budgeted(tiny_checkpoint, exported)[0]).quality
    assert stored is not None

    def measure(*given: object) -> Quality:
        folder = given[2]
        assert isinstance(folder, Path)
        (folder / QUALITY).write_bytes(b"")
        return stored.model_copy(update={"perplexity_ratio": 1.2})

    monkeypatch.setattr(quality, "measure", measure)
    checkpoint, out = tiny_checkpoint("llama", tied=True, num_hidden_layers=1), tmp_path / "out" / "package"
    said = r"`max_perplexity_ratio=1\.0005` is not met: the package has 1\.2000 with .*; nothing was published"
    with pytest.raises(ParityError, match=said):
        export_to(out, checkpoint, precision="int4", block_size=32, max_perplexity_ratio=1.0005)
    assert not list(out.parent.iterdir())


@pytest.mark.heavy
@pytest.mark.parametrize("model_type", ["gemma3", "mixtral"])
def test_recorded_mix_is_reproducible_with_keep(model_type: str, exported: Exported, tmp_path: Path) -> None:
    """Patterns use transformers' module names; checkpoint names differ and experts are several tensors."""
    checkpoint = recipes.save(tmp_path / model_type, model_type)
    options = {"precision": "int4", "block_size": 32}
    room = 2 * read_manifest(exported(checkpoint, **options)).graph.weight_bytes
    mixed = exported(checkpoint, **options, max_weight_size=room)
    said = dict(each.split("=") for each in packed_of(mixed).keep)
    assert [name for name in said if "self_attn.q_proj" in name]
    if model_type == "mixtral":
        assert [name for name in said if name.endswith(".experts")]
    again = exported(checkpoint, **options, keep=said)
    assert (again / WEIGHTS).read_bytes() == (mixed / WEIGHTS).read_bytes()


def test_max_weight_size_below_the_smallest_package_is_rejected(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    keep = {"model": "fp32", "lm_head": "fp32"}
    for kept, said in ((None, "with int4 for all weights"), (keep, "and none of them can be quantised")):
        with pytest.raises(ResourceError, match=rf"`max_weight_size=.*`: the weights take .* {said}"):
            out, checkpoint = tmp_path / "out" / "package", tiny_checkpoint("llama")
            export_to(out, checkpoint, precision="int4", keep=kept, max_weight_size=1000)
    assert not list((tmp_path / "out").iterdir())
