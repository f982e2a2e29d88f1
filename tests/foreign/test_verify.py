"""`partita verify FOLDER --reference CHECKPOINT` for folders of other exporters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from partita import cli
from tests.conftest import require
from tests.foreign.conftest import SAMPLES, Sample, changed

CHECKPOINT = str(SAMPLES / "checkpoint")


def test_verify_of_foreign_folder_requires_reference(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sample("optimum")
    assert cli.run(["verify", str(folder), "--provider", "cpu"]) == 1
    err = capsys.readouterr().err
    assert "no known answer" in err and f"partita verify {folder} --reference CHECKPOINT" in err


@pytest.mark.parametrize("layout", ["merged", "genai-fp32-cpu"])
def test_foreign_folder_is_verified_against_checkpoint(
    layout: str, sample: Sample, capsys: pytest.CaptureFixture[str]
) -> None:
    require("torch")
    folder = sample(layout)
    command = ["verify", str(folder), "--provider", "cpu", "--reference", CHECKPOINT, "--json"]
    assert cli.run(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "verified" and {"prefill", "decode 8"} <= {step["step"] for step in result["steps"]}
    assert max(step["max_rel_error"] for step in result["steps"]) < 1e-4


def test_verify_fails_against_different_checkpoint(
    sample: Sample, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    require("torch")
    from safetensors.numpy import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(CHECKPOINT, other)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    save_file({**weights, name: -weights[name]}, other / "model.safetensors", metadata={"format": "pt"})
    command = ["verify", str(sample("optimum")), "--provider", "cpu", "--reference", str(other)]
    assert cli.run(command) == 4
    assert "FAILED" in capsys.readouterr().out
    changed(other / "config.json", vocab_size=100)
    assert cli.run(command) != 0


def test_verify_of_int4_weights_gives_no_verdict(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    require("torch")
    folder = sample("genai-int4-cpu")
    command = ["verify", str(folder), "--provider", "cpu", "--reference", CHECKPOINT]
    assert cli.run(command) == 0
    out = capsys.readouterr().out
    assert "no verdict" in out and "FAILED" not in out and "verified" not in out


def test_verify_of_package_rejects_reference_and_variant(
    tiny_checkpoint, exported, capsys: pytest.CaptureFixture[str]
) -> None:
    package = exported(tiny_checkpoint("llama"))
    assert cli.run(["verify", str(package), "--provider", "cpu", "--reference", CHECKPOINT]) == 2
    assert "has its own known answer" in capsys.readouterr().err
    assert cli.run(["verify", str(package), "--provider", "cpu", "--variant", "q4"]) == 2
    assert (
        f"--variant is only for folders that Partita did not write; {package} is a package" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("more", "code"), [([], 4), (["--max-length", "20"], 0)])
def test_verify_fails_beyond_sliding_window_missing_from_graph(
    more: list[str], code: int, sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outputs match up to the window length and differ beyond it."""
    folder, checkpoint = sample("optimum"), tmp_path / "checkpoint"
    shutil.copytree(SAMPLES / "checkpoint", checkpoint)
    changed(folder / "config.json", sliding_window=20)
    changed(checkpoint / "config.json", sliding_window=20, model_type="mistral", architectures=["MistralForCausalLM"])
    assert cli.run(["verify", str(folder), "--reference", str(checkpoint), "--provider", "cpu", *more]) == code
    assert ("has a window of 20 tokens, but the graph's attention has none" in capsys.readouterr().err) is (code == 4)
