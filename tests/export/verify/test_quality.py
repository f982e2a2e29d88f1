"""Quality loss of rounded weights, 16-bit packages included, and its repetition without the source model."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file, save_file

import partita
from partita import cli
from partita.commands.export import quality_texts
from partita.commands.verify import show_evaluation
from partita.demo import heldout_path
from partita.errors import GenerationError, PackageError, ResourceError, UnsupportedModelError, UsageError
from partita.export import writing
from partita.export.checkpoint.description import open_checkpoint
from partita.export.options import ExportOptions, check_options
from partita.export.progress import Silent
from partita.export.verify import quality
from partita.export.verify.quality import Logits, Scorer, kept_tokens, measured_tokens, read_text
from partita.export.work import Work, resolve
from partita.package.folder import QUALITY, Manifest, check_files, read_manifest, record_file, write_manifest
from partita.package.records import Evaluation, Verification
from partita.providers.resolve import parse_chain
from partita.runtime.chain.advice import package_facts
from partita.runtime.verify.quality import divergence_at_least, evaluate
from tests.conftest import Exported, TinyCheckpoint


@pytest.fixture
def half(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama", num_hidden_layers=1), precision="fp16")


def compared(ours: torch.Tensor, theirs: torch.Tensor) -> quality.Measured:
    """What is noted of logits [1, L, vocab] of a package beside those of its original."""
    _, positions, vocabulary = ours.shape
    found = quality.Measured(np.zeros((1, positions + 1), np.int64), vocabulary)
    for place in range(positions):
        found.note(0, place, ours[0, place].numpy(), theirs[0, place])
    found.flush()
    return found


def test_fp16_package_records_quality(half: Path) -> None:
    """In the manifest, the files, reports and `inspect`."""
    manifest = read_manifest(half)
    check_files(half, manifest, hashes=True)
    found = manifest.quality
    assert found is not None and manifest.file(QUALITY) is not None and found.text == "heldout.txt"
    assert 256 <= found.tokens <= 512 and abs(found.perplexity_ratio - 1) < 1e-3
    assert 0 < found.kl_mean < found.kl_p99 < 1e-3 and found.top1_agreement > 0.98 and found.converted_copy is None
    reported = package_facts(half, manifest).quality
    assert reported is not None and reported.kl_mean == found.kl_mean
    (line,) = quality_texts(manifest)
    assert "ratio 1.000" in line or "ratio 0.999" in line
    assert f"KL divergence {found.kl_mean:.1e}" in line, "and not 0.0000"
    assert "KL divergence" in str(partita.inspect(half).provenance.quality)


def test_bf16_quality_is_measured_on_converted_copy(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    """The CPU provider has no bfloat16 kernels."""
    package = exported(tiny_checkpoint("llama", num_hidden_layers=1), precision="bf16")
    manifest = read_manifest(package)
    found = manifest.quality
    assert found is not None and found.converted_copy == manifest.verification.converted_copy and found.kl_mean > 0
    assert "float32 arithmetic" in quality_texts(manifest)[0]
    assert not list(package.parent.glob("*-copy-*"))


def test_lossless_weights_have_near_zero_divergence(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    checkpoint = tiny_checkpoint("llama", dtype="bfloat16", tied=True, num_hidden_layers=1)
    found = read_manifest(exported(checkpoint, precision="bf16", activations="fp32")).quality
    assert found is not None and found.top1_agreement == 1 and found.kl_mean < 1e-9


def test_fp32_package_has_no_quality(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    package = exported(tiny_checkpoint("llama", num_hidden_layers=1))
    manifest = read_manifest(package)
    assert manifest.quality is None and quality_texts(manifest) == [] and not (package / QUALITY).exists()
    with pytest.raises(PackageError, match="quality is not measured for fp32 packages"):
        evaluate(package, parse_chain("cpu"))


def test_unmeasured_package_reports_missing_quality(half: Path, own_copy: Callable[[Path], Path]) -> None:
    manifest = read_manifest(half).model_copy(
        update={
            "quality": None,
            "verification": Verification(status="unverified", detail="exported with `verify=False`"),
        }
    )
    assert quality_texts(manifest) == ["not measured: the source model was not run"]
    package = own_copy(half)
    (package / QUALITY).unlink()
    with pytest.raises(PackageError, match=r"no quality\.safetensors: it was exported without its source model"):
        evaluate(package, parse_chain("cpu"), manifest=manifest)


def test_quality_is_repeatable_without_source_model(half: Path) -> None:
    stored, now = read_manifest(half).quality, evaluate(half, parse_chain("cpu"))
    assert stored is not None and stored.likely is not None
    assert math.isclose(now.perplexity_ratio, stored.perplexity_ratio, rel_tol=1e-5)
    assert (now.tokens, now.kl_tokens) == (stored.tokens, stored.likely.tokens)
    assert now.kl_mean_at_least == pytest.approx(stored.likely.kl_mean, rel=1e-3)
    assert now.kl_p99_at_least == pytest.approx(stored.likely.kl_p99, rel=1e-3)
    assert now.kl_share == pytest.approx(stored.likely.share, rel=1e-5)
    assert 0.3 * stored.kl_mean < stored.likely.kl_mean <= stored.kl_mean


def save_figures(package: Path, figures: dict[str, Any]) -> None:
    """Put other figures of the original into a package."""
    save_file(figures, package / QUALITY)
    manifest = read_manifest(package)
    files = tuple(each for each in manifest.files if each.name != QUALITY)
    write_manifest(package, manifest.model_copy(update={"files": (*files, record_file(package, QUALITY))}))


def test_overflowing_loss_gives_maximum_perplexity(
    half: Path, own_copy: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the package and for its source model."""
    package = own_copy(half)
    figures = load_file(package / QUALITY)
    save_figures(package, {**figures, "losses": figures["losses"] + np.float32(1e4)})
    monkeypatch.setattr("partita.runtime.verify.quality.loss", lambda logits, token: 1e4)
    now = evaluate(package, parse_chain("cpu"))
    assert now.perplexity == now.original_perplexity == math.exp(709) and now.perplexity_ratio == 1


def test_evaluate_prints_divergence_as_text_and_json(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["evaluate", str(half), "--provider", "cpu"]) == 0
    text = capsys.readouterr().out
    stored = read_manifest(half).quality
    assert stored is not None and stored.likely is not None
    assert f">= {stored.likely.kl_mean:.1e}" in text and f"{stored.kl_mean:.1e}" in text
    assert "lower bound" in text and f"{stored.likely.share:.1%}" in text
    assert cli.run(["evaluate", str(half), "--provider", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kl_mean_at_least"] == pytest.approx(stored.likely.kl_mean, rel=1e-3)
    assert found["kl_tokens"] == stored.likely.tokens and found["at_export"]["likely"]["share"] == stored.likely.share


@pytest.mark.parametrize("spread", [1e-4, 1e-2, 1.0])
def test_stored_divergence_is_a_lower_bound_matched_by_evaluate(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    """With the whole vocabulary stored, it equals the exact divergence."""
    random = torch.Generator().manual_seed(1)
    theirs = torch.randn(1, 9, 300, generator=random) * 4
    ours = theirs + spread * torch.randn(1, 9, 300, generator=random)
    theirs[0, 2, 5] = ours[0, 2, 5] = -torch.inf
    mine, other = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    exact = torch.nan_to_num(other.exp() * (other - mine)).sum(-1).numpy()
    before = np.zeros_like(exact)
    for count in (4, 64, 300):
        monkeypatch.setattr(quality, "MOST_LIKELY", count)
        found = compared(ours, theirs)
        np.testing.assert_allclose(found.divergence, exact, rtol=1e-6, atol=1e-14)
        assert found.likely.shape == (1, 9, count)
        assert (found.likely_divergence <= exact * (1 + 1e-6)).all()
        assert (found.likely_divergence >= before * (1 - 1e-6)).all(), "the more tokens, the closer"
        before = found.likely_divergence
        shares = np.exp(
            np.concatenate([found.likely_logprobs, found.rest_logprobs[..., None]], axis=-1, dtype=np.float64)
        )
        shares /= shares.sum(-1, keepdims=True)
        again = [divergence_at_least(ours[0, n].numpy(), found.likely[0, n], shares[0, n]) for n in range(9)]
        np.testing.assert_allclose(again, found.likely_divergence[0], rtol=1e-2, atol=1e-13)
    np.testing.assert_allclose(before, exact, rtol=1e-6, atol=1e-14)


def test_divergence_below_float32_error_is_accurate() -> None:
    """As of lossless weights: logits differ by a few float32 steps, and no divergence is negative."""
    random = torch.Generator().manual_seed(2)
    theirs = torch.randn(1, 4, 20_000, generator=random) * 3
    ours = theirs * (1 + 1e-6 * torch.randn(1, 4, 20_000, generator=random))
    mine, other = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    exact = (other.exp() * (other - mine)).sum(-1).numpy()
    found = compared(ours, theirs)
    assert (exact < 1e-10).all()
    np.testing.assert_allclose(found.divergence, exact, rtol=1e-3)


@pytest.mark.parametrize("vocabulary", [50, 32_000, 65_536, 152_064])
@pytest.mark.parametrize("positions", [1, 511, 1023, 8176])
def test_stored_probabilities_take_at_most_2_mib(positions: int, vocabulary: int) -> None:
    count = kept_tokens(positions, vocabulary)
    size = 6 if vocabulary <= 65_536 else 8
    assert 1 <= count <= min(64, vocabulary) and count * positions * size <= 2 << 20
    assert count >= min(32, vocabulary)


def test_measured_token_count_depends_on_options_and_model_size() -> None:
    options = ExportOptions("a", Path("b"), precision="int4")
    judged = replace(options, max_perplexity_ratio=1.01)
    assert measured_tokens(options, 10**6) == measured_tokens(options, 10**10) == 512
    assert measured_tokens(judged, 10**6) == 8192 and measured_tokens(judged, 10**10) == 1024
    assert measured_tokens(replace(judged, quality_tokens=40), 10**6) == 40


@pytest.mark.parametrize("given", [{"quality_text": Path("text")}, {"quality_tokens": 100}])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp32"}, "measures the loss of quantisation, but `precision=fp32` quantises nothing"),
        ({"precision": "bf16", "verify": False}, "omit one of them"),
    ],
)
def test_quality_options_without_measurement_are_rejected(
    given: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        check_options(ExportOptions("a", Path("b"), **given, **options))


def test_non_finite_logits_during_scoring_reject_package(
    tiny_checkpoint: TinyCheckpoint, half: Path, tmp_path: Path
) -> None:
    """float16 overflows on the text, but not in the verification."""

    class Overflowing:
        rows, provider = 1, "cpu"

        def continues_at(self, length: int) -> int | None:
            return None

        def score(self, windows: Sequence[Sequence[int]], hear: Callable[[int, int, Logits], object]) -> None:
            raise GenerationError("the logits after token 3 of a window are not finite")

        def cached(self) -> Iterator[tuple[str, Any]]:
            return iter(())

    @contextmanager
    def opened(folder: Path, manifest: Manifest) -> Iterator[Scorer]:
        yield Overflowing()

    checkpoint, manifest = open_checkpoint(str(tiny_checkpoint("llama", num_hidden_layers=1))), read_manifest(half)
    work = Work(ExportOptions(checkpoint.source_name, tmp_path, precision="fp16"), Silent(), tmp_path, scorer=opened)
    made: Any = SimpleNamespace(work=work, checkpoint=checkpoint, manifest=manifest)
    text = read_text(heldout_path(), checkpoint, manifest.graph.vocab_size, 64, 512)
    work.source_logits = work.cleanup.enter_context(
        closing(quality.SourceLogits(text, manifest.graph.vocab_size, tmp_path))
    )
    said = r"fp16 fails on heldout\.txt.*not finite; nothing was written; choose another `precision`, e\.g\. bf16"
    with work.cleanup, pytest.raises(UnsupportedModelError, match=said):
        writing._with_quality(made, manifest, text)


def test_disk_too_small_for_logits_of_source_model_raises_resource_error(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality.SourceLogits, "size_bytes", 1 << 60)
    with pytest.raises(ResourceError, match="no space left: the package needs 1,048,576 TiB"):
        exported(tiny_checkpoint("llama", num_hidden_layers=1), precision="fp16", opset=22)


def test_infinite_and_nan_logits_raise_generation_error() -> None:
    """Negative infinity is allowed: it marks an excluded token."""
    from partita.runtime.verify.quality import _checked

    for wrong in (np.inf, np.nan):
        with pytest.raises(GenerationError, match="not finite"):
            _checked(0, print)(0, np.array([0.0, wrong], np.float32))
    heard: list[Any] = []
    _checked(0, lambda *given: heard.append(given))(2, np.array([0.0, -np.inf], np.float32))
    assert heard[0][:2] == (0, 2), "a token that is ruled out is none"


def test_default_text_is_used_only_with_verification_and_rounding() -> None:
    floats: Any = SimpleNamespace(quantised=None)
    options = ExportOptions("a", Path("b"), precision="fp16")
    assert resolve(options, floats, None, heldout_path()).quality_text == heldout_path()
    assert resolve(replace(options, verify=False), floats, None, heldout_path()).quality_text is None
    assert resolve(replace(options, precision="fp32"), floats, None, heldout_path()).quality_text is None


def test_package_without_stored_probabilities_has_no_divergence(
    half: Path, own_copy: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    package = own_copy(half)
    kept = {name: each for name, each in load_file(package / QUALITY).items() if "likely" not in name}
    save_figures(package, kept)
    now = evaluate(package, parse_chain("cpu"))
    assert now.kl_mean_at_least is None and now.kl_tokens is None and now.perplexity > 0
    text = shown(package, read_manifest(half), now)
    assert "not measured: the package lacks the source model's probabilities" in text and ">=" not in text


def shown(package: Path, manifest: Manifest, now: Evaluation) -> str:
    stream = io.StringIO()
    show_evaluation(package, manifest, now, Console(file=stream, width=200, color_system=None))
    return stream.getvalue()
