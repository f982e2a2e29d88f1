"""16-bit mixture-of-experts models: a float32 copy verifies the graph if rounding changes the selected experts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from partita.export.verify import package_runs
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
def test_moe_in_16_bits_is_verified_except_rerouted_positions(mixture: Path) -> None:
    found = read_manifest(mixture).verification
    assert found.status == "verified" and found.converted_copy is None and found.proof == package_runs.PROOF
    assert 0 < found.rerouted < 16 and f"except {found.rerouted} of 32 positions" in found.detail
    again = verify.replay(mixture, parse_chain("cpu"), threads=1)
    assert (again.status, again.rerouted) == ("verified", found.rerouted), "verify takes it as export did"
    strict = verify.replay(mixture, parse_chain("cpu"), threads=1, tolerance=0.1)
    assert strict.status == "unverified", "a tolerance that was asked for leaves nothing out"
    assert not list(mixture.parent.glob("*-copy-*"))


def test_moe_graph_wrong_at_few_positions_is_not_verified(mixture: Path, tmp_path: Path) -> None:
    """Without the float32 copy, fewer than half of the positions differ and would be excluded."""
    folder, manifest = damaged(mixture, tmp_path / "package")
    assert package_runs.verify_with_copy(folder, manifest, replay).status == "unverified"
    believed = read_manifest(mixture).verification
    found = replay(folder, manifest.model_copy(update={"verification": believed}))
    assert found.status == "verified" and found.rerouted > believed.rerouted


def test_mismatch_of_dense_model_excludes_no_positions(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    """Even if its float32 copy matches: it selects no experts."""
    package = exported(tiny_checkpoint("llama"), precision="fp16")
    right = replay(package, read_manifest(package))
    folder, manifest = damaged(package, tmp_path / "package")

    def run(of: Path, its: Manifest):
        return replay(of, its) if of == folder else right

    assert right.status == "verified" and package_runs.verify_with_copy(folder, manifest, run).status == "unverified"


def damaged(package: Path, folder: Path) -> tuple[Path, Manifest]:
    """A copy with another known answer at one position, and its manifest as it is while it is exported."""
    shutil.copytree(package, folder)
    answer = load_file(folder / KNOWN_ANSWER)
    answer["prefill_logits"][3] = np.roll(answer["prefill_logits"][3], 7)
    save_file(answer, folder / KNOWN_ANSWER)
    manifest = read_manifest(folder)
    files = tuple(record_file(folder, each.name) for each in manifest.files)
    nothing = manifest.verification.model_copy(update={"status": "unverified", "converted_copy": None, "proof": None})
    return folder, manifest.model_copy(update={"files": files, "verification": nothing})
