"""Replay of the reference outputs: a correct package verifies, and every kind of mismatch is reported."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from partita.errors import PackageError
from partita.package.folder import KNOWN_ANSWER, TOLERANCES, read_manifest
from partita.providers.resolve import parse_chain
from partita.runtime.verify.comparison import Comparison, set_aside
from partita.runtime.verify.replay import first_difference, replay
from tests.runtime.handmade_packages import VOCAB, WIDTH, handmade, reseal

PAIR = {"attention": "gqa", "static_shapes": True, "prefill_chunk": 6}


def answer_sizes(folder):
    """Prompt tokens and decode steps of the known answer, and the size of the vocabulary."""
    tensors = load_file(folder / KNOWN_ANSWER)
    return len(tensors["prompt"]), *tensors["decode_logits"].shape


def change_answer(folder, change):
    tensors = load_file(folder / KNOWN_ANSWER)
    change(tensors)
    save_file(tensors, folder / KNOWN_ANSWER, metadata={"reference": "changed"})
    reseal(folder)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        pytest.param({"attention": "onnx24"}, marks=pytest.mark.heavy),
        pytest.param({"batch_size": 3}, marks=pytest.mark.heavy),
        {"batch_size": 3, "attention": "onnx24"},
        pytest.param(PAIR, marks=pytest.mark.heavy),
        pytest.param({**PAIR, "batch_size": 2}, marks=pytest.mark.heavy),
        {"precision": "fp16"},
        pytest.param({"precision": "fp16", "attention": "onnx24"}, marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_correct_package_verifies_in_every_step(tiny_package, spec):
    folder = tiny_package(**spec)
    found = replay(folder, parse_chain("cpu"), threads=1)
    assert found.status == "verified", found.detail
    _, decoded, _ = answer_sizes(folder)
    assert decoded > 1
    assert [step.step for step in found.steps] == [
        "prefill",
        "chunked prefill",
        *(f"decode {n}" for n in range(1, decoded + 1)),
        *["rows of different length"] * (spec.get("batch_size", 1) > 1),
        *["rows by themselves"] * read_manifest(folder).graph.symbolic_batch,
    ]
    assert found.tolerance == TOLERANCES[spec.get("precision", "fp32")]
    assert all(step.tokens_equal and 0 < step.max_rel_error <= found.tolerance for step in found.steps)
    assert found.provider == "CPUExecutionProvider"
    tools = {name: re.escape(version) for name, version in read_manifest(folder).toolchain.items()}
    ran = rf"transformers {tools['transformers']}, torch {tools['torch']}\S*: sdpa attention, float32"
    assert re.fullmatch(ran, found.reference or "")
    assert first_difference(found) is None


def test_near_ties_are_counted_but_not_compared(package_copy):
    folder = package_copy()

    def tie(tensors):
        row = tensors["decode_logits"][3]
        best, second = np.argsort(row)[[-1, -2]]
        row[best], row[second] = row[second], row[second] + 1e-6

    change_answer(folder, tie)
    found = replay(folder, parse_chain("cpu"), threads=1, tolerance=1.0)
    prompt, decoded, _ = answer_sizes(folder)
    assert found.near_ties == prompt + decoded
    assert all(step.tokens_equal for step in found.steps)


def test_mismatch_detail_names_first_differing_step_and_output(package_copy):
    folder = package_copy()

    def shift(tensors):
        tensors["decode_logits"][4] += 0.1

    change_answer(folder, shift)
    found = replay(folder, parse_chain("cpu"), threads=1)
    assert found.status == "unverified"
    assert found.detail.startswith("first difference in decode 5, output logits")
    assert [step.max_rel_error <= 1e-4 for step in found.steps].count(False) == 1
    data = np.fromfile(folder / "model.onnx.data", np.float32) * np.float32(1.01)
    data.tofile(folder / "model.onnx.data")
    found = replay(folder, parse_chain("cpu"), threads=1)
    assert found.status == "unverified"
    assert found.detail.startswith("first difference in prefill, output logits: max relative error ")


def test_step_beyond_cache_length_is_not_reported(tiny_package):
    """No decode step follows the token that fills the cache."""
    folder = tiny_package(max_length=32)
    prompt, decoded, _ = answer_sizes(folder)
    assert prompt + decoded == 32
    found = replay(folder, parse_chain("cpu"), threads=1)
    assert found.status == "verified"
    steps = [step.step for step in found.steps]
    assert f"decode {decoded - 1}" in steps and f"decode {decoded}" not in steps
    assert all(step.max_rel_error > 0 for step in found.steps)


def test_different_greedy_token_is_mismatch_within_tolerance():
    unheard = Comparison("decode 8", "logits", np.ones((1, 10), np.float32), tolerance=0.02)
    assert unheard.result().max_rel_error == float("inf")
    reference = np.zeros((1, 10), np.float32)
    reference[0, 3], reference[0, 4] = 1.0, 0.9
    other = reference[0].copy()
    other[4] = 1.02
    comparison = Comparison("prefill", "logits", reference, tolerance=0.02)
    comparison.compare(0, reference[0])
    comparison.compare(0, other)
    assert not comparison.result().tokens_equal
    assert not comparison.ties


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shapes", ["any", "pair"])
def test_package_with_nan_logits_is_unverified_at_any_batch_size(tmp_path, batch, shapes):
    folder = handmade(tmp_path / "package", batch=batch, shapes=shapes)
    sound = replay(folder, parse_chain("cpu"), threads=1)
    assert sound.status == "verified", sound.detail
    for path in folder.glob("*.onnx"):
        model = onnx.load(path)
        for weight in model.graph.initializer:
            if tuple(weight.dims) == (WIDTH, VOCAB) and weight.data_type == onnx.TensorProto.FLOAT:
                values = onnx.numpy_helper.to_array(weight).copy()
                values[:, 7] = np.nan
                weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        onnx.save(model, path)
    reseal(folder)
    found = replay(folder, parse_chain("cpu"), threads=1)
    assert found.status == "unverified" and found.detail.startswith("first difference in prefill, output logits")
    assert [step.step for step in found.steps] == [step.step for step in sound.steps], "every comparison is told"
    assert all(step.max_rel_error == float("inf") for step in found.steps)


def test_missing_damaged_or_foreign_reference_raises_package_error(package_copy):
    folder = package_copy()

    def widen(tensors):
        length, vocab = tensors["prefill_logits"].shape
        tensors["prefill_logits"] = np.zeros((length, vocab + 1), np.float32)

    change_answer(folder, widen)
    with pytest.raises(PackageError, match="does not belong to this package"):
        replay(folder, parse_chain("cpu"))
    (folder / KNOWN_ANSWER).write_bytes((folder / KNOWN_ANSWER).read_bytes()[:100])
    reseal(folder)
    with pytest.raises(PackageError, match="damaged"):
        replay(folder, parse_chain("cpu"))
    (folder / KNOWN_ANSWER).unlink()
    with pytest.raises(PackageError, match="export the checkpoint without"):
        replay(folder, parse_chain("cpu"))


@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, np.float32(-65504.0), -np.inf])
def test_masked_logits_do_not_hide_other_mismatches(lowest):
    """Masked logits are the lowest float of the precision and would dominate a relative error."""
    reference = np.array([[3.0, 1.0, np.finfo(np.float32).min]], np.float32)
    for ours, agrees in (
        ([3.0, 1.0, lowest], True),
        ([3.0, 1.5, lowest], False),
        ([3.0, 1.0, 0.0], False),
        ([3.0, np.nan, lowest], False),
    ):
        comparison = Comparison("prefill", "logits", reference, tolerance=1e-4)
        comparison.compare(0, np.array(ours, np.float32))
        comparison.compare(0, reference[0])
        assert (comparison.result().max_rel_error <= 1e-4) is agrees
        assert not comparison.ties


def compared(off, count=8, kind="prefill", error=0.5):
    """A comparison in which so many of the positions are further off than allowed."""
    reference = np.zeros((count, 10), np.float32)
    reference[:, 3] = 1.0
    comparison = Comparison(kind, "logits", reference, tolerance=0.1, kind=kind)
    for position in range(count):
        ours = reference[position].copy()
        ours[4] = error if position < off else 0.01
        comparison.compare(position, ours)
    return comparison


@pytest.mark.parametrize(
    ("off", "error", "left"), [(0, 0.5, 0), (3, 0.5, 3), (3, 2.0, 3), (4, 0.5, 0), (8, 0.5, 0), (1, np.inf, 0)]
)
def test_rerouted_positions_are_excluded_only_as_a_minority(off, error, left):
    """Half the positions of a kind of step, or a non-finite logit, stay a mismatch."""
    comparison = compared(off, error=error)
    set_aside([comparison])
    found = comparison.result()
    assert found.rerouted == left == len(comparison.excluded)
    assert (found.max_rel_error <= 0.1 and found.tokens_equal) == (off == left)


def test_majority_for_exclusion_is_counted_per_step_kind():
    """Prompt positions do not outvote a kernel that is wrong only in decode steps."""
    prompt, decode = compared(0, count=24), [compared(1, count=1, kind="decode") for _ in range(5)]
    decode += [compared(0, count=1, kind="decode") for _ in range(3)]
    set_aside([prompt, *decode])
    assert not any(entry.excluded for entry in (prompt, *decode))


@pytest.mark.parametrize("bias", [-1e4, -65504.0, -1e9])
def test_vocabulary_padding_does_not_hide_other_mismatches(bias):
    """The head has a large bias on padding entries; errors are relative to the likeliest tokens."""
    reference = np.array([[3.0, 1.0, -2.0, bias], [-1.0, 2.5, 0.5, bias]], np.float32)
    for change, agrees in ((0.0, True), (1e-5, True), (0.5, False)):
        comparison = Comparison("prefill", "logits", reference, tolerance=1e-4)
        for position, row in enumerate(reference):
            ours = row.copy()
            ours[1] += change
            ours[3] *= 1 + 1e-5  # in proportion to itself this is little
            comparison.compare(position, ours)
        assert (comparison.result().max_rel_error <= 1e-4) is agrees
        assert not comparison.ties


def test_every_row_of_a_batch_is_compared(open_runner, monkeypatch):
    seen: Counter[tuple[str, int]] = Counter()
    compare = Comparison.compare

    def spy(self, position, ours):
        seen[self.step, position] += 1
        compare(self, position, ours)

    runner = open_runner(batch_size=3)  # its export compares, too
    monkeypatch.setattr(Comparison, "compare", spy)
    replay(runner.folder, parse_chain("cpu"), threads=1)
    differing = ("rows of different length", "rows by themselves")
    alike = {key: count for key, count in seen.items() if key[0] not in differing}
    assert set(alike.values()) == {3} and len(seen) > len(alike)
