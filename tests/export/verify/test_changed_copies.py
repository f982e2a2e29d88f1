"""Mixtures in 16 bits: where rounding alone changes the chosen experts, a copy in float32 proves the graph."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from partita.export.verify import changed_copy
from partita.library.exporting import replay
from partita.package.folder import KNOWN_ANSWER, Manifest, read_manifest, record_file
from partita.providers.resolve import parse_chain
from partita.runtime.verify import replay as verify
from tests.conftest import Exported, TinyCheckpoint


@pytest.fixture(scope="module")
def mixture(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    """In float16 some of its tokens go to other experts: with random weights several are nearly equally good."""
    return exported(tiny_checkpoint("olmoe", seed=4), precision="fp16")


@pytest.mark.heavy
def test_a_mixture_in_16_bits_is_verified_where_its_experts_are_the_same(mixture: Path) -> None:
    found = read_manifest(mixture).verification
    assert found.status == "verified" and found.converted_copy is None and found.proof == changed_copy.PROOF
    assert 0 < found.rerouted < 16 and f"except {found.rerouted} of 32 positions" in found.detail
    again = verify.replay(mixture, parse_chain("cpu"), threads=1)
    assert (again.status, again.rerouted) == ("verified", found.rerouted), "verify takes it as export did"
    strict = verify.replay(mixture, parse_chain("cpu"), threads=1, tolerance=0.1)
    assert strict.status == "unverified", "a tolerance that was asked for leaves nothing out"
    assert not list(mixture.parent.glob("*-copy-*"))


def test_a_graph_that_is_wrong_at_a_few_positions_is_not_proven(mixture: Path, tmp_path: Path) -> None:
    """They are fewer than half: without the copy, which must match at every position, they would be excluded."""
    folder = tmp_path / "package"
    shutil.copytree(mixture, folder)
    answer = load_file(folder / KNOWN_ANSWER)
    answer["prefill_logits"][3] = np.roll(answer["prefill_logits"][3], 7)
    save_file(answer, folder / KNOWN_ANSWER)
    manifest = unverified(folder)
    assert changed_copy.verify_with_copy(folder, manifest, replay).status == "unverified"
    believed = read_manifest(mixture).verification
    found = replay(folder, manifest.model_copy(update={"verification": believed}))
    assert found.status == "verified" and found.rerouted > believed.rerouted


def test_a_dense_model_that_differs_has_nothing_to_leave_out(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    """Even where its copy matches: it chooses no experts."""
    folder = tmp_path / "package"
    shutil.copytree(exported(tiny_checkpoint("llama"), precision="fp16"), folder)
    manifest = unverified(folder)
    right = replay(folder, manifest)
    answer = load_file(folder / KNOWN_ANSWER)
    answer["prefill_logits"][3] = np.roll(answer["prefill_logits"][3], 7)
    save_file(answer, folder / KNOWN_ANSWER)
    manifest = unverified(folder)

    def run(of: Path, its: Manifest):
        return replay(of, its) if of == folder else right

    assert right.status == "verified" and changed_copy.verify_with_copy(folder, manifest, run).status == "unverified"


def unverified(folder: Path) -> Manifest:
    """The manifest of a package as it is while it is exported."""
    manifest = read_manifest(folder)
    files = tuple(record_file(folder, each.name) for each in manifest.files)
    nothing = manifest.verification.model_copy(update={"status": "unverified", "converted_copy": None, "proof": None})
    return manifest.model_copy(update={"files": files, "verification": nothing})
