"""Sampling as a user asks for it: what is ignored is said, a run can be repeated, and a checkpoint has its say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from partita.cli import run
from partita.commands.generate_options import parse_ids
from partita.errors import UsageError
from partita.library.sampling import Sampling, complete_sampling_for
from partita.package.folder import read_manifest, record_file, write_manifest
from tests.conftest import Exported, TinyCheckpoint

PROMPT = "return the value of"
SUGGESTS = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": 2}


@pytest.fixture(scope="session")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"))


@pytest.fixture
def suggesting(package: Path, tmp_path: Path):
    """A copy of the package whose generation_config.json says what it is given."""

    def write(config: dict[str, Any]) -> Path:
        folder = shutil.copytree(package, tmp_path / "suggesting", dirs_exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
        manifest = read_manifest(folder)
        files = [
            record_file(folder, entry.name) if entry.name == "generation_config.json" else entry
            for entry in manifest.files
        ]
        write_manifest(folder, manifest.model_copy(update={"files": tuple(files)}))
        return folder

    return write


@pytest.fixture
def generated(capsys: pytest.CaptureFixture[str]):
    """Runs generate; stdout and stderr."""

    def generate(package: Path, *options: object, code: int = 0) -> tuple[str, str]:
        arguments = ["generate", package, PROMPT, "-n", 10, "--provider", "cpu", *options]
        assert run([str(a) for a in arguments]) == code, capsys.readouterr().err
        captured = capsys.readouterr()
        return captured.out, captured.err

    return generate


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--top-k", 5], "--top-k is ignored"),
        (["--top-k", 5, "--seed", 4, "--temperature", 0], "--top-k and --seed are ignored"),
    ],
    ids=str,
)
def test_what_a_greedy_run_ignores_is_said(package, generated, options, named):
    plain, _ = generated(package)
    text, err = generated(package, *options)
    assert text == plain
    assert f"note: {named}: temperature 0" in err and "--temperature" in err
    assert err.count("ignored") == 1


@pytest.mark.parametrize("options", [["--repetition-penalty", 1.2], ["-t", 0.8, "--top-k", 5]], ids=str)
def test_what_is_not_ignored_is_not_said_to_be(package, generated, options):
    assert "ignored" not in generated(package, *options)[1]


def test_a_drawn_seed_is_said_everywhere_and_repeats_the_run(package, generated, tmp_path):
    out, err = generated(package, "--temperature", 2, "--json", "--report", tmp_path / "r.json")
    seed = int(re.findall(r"--seed (\d+) repeats this run", err)[0])
    answer, report = json.loads(out), json.loads((tmp_path / "r.json").read_text())
    assert answer["options"]["seed"] == seed
    assert report["request"]["options"]["seed"] == str(seed)
    again = json.loads(generated(package, "--temperature", 2, "--json", "--seed", seed)[0])
    assert again["rows"] == answer["rows"]
    seeds = {re.findall(r"seed (\d+)", generated(package, "--temperature", 2)[1])[0] for _ in range(3)}
    assert len(seeds) == 3, "a seed that is not given is not the same again"


def test_a_greedy_run_has_no_seed(package, generated):
    out, err = generated(package, "--json")
    assert json.loads(out)["options"]["seed"] is None and "seed" not in err


def test_what_the_checkpoint_suggests_is_said_and_taken_when_asked(suggesting, package, generated):
    folder = suggesting(SUGGESTS)
    text, err = generated(folder)
    assert text == generated(package)[0], "greedy by default"
    line = "the checkpoint suggests temperature 0.7, top-k 50, top-p 0.9: --sampling checkpoint"
    assert line in err
    out, err = generated(folder, "--sampling", "checkpoint", "--seed", 3, "--json")
    assert "suggests" not in err
    options = json.loads(out)["options"]
    assert (options["temperature"], options["top_k"], options["top_p"], options["seed"]) == (0.7, 50, 0.9, 3)
    same = generated(package, "-t", 0.7, "--top-k", 50, "--top-p", 0.9, "--seed", 3, "--json")[0]
    assert json.loads(out)["rows"] == json.loads(same)["rows"]


def test_options_come_before_what_the_checkpoint_suggests(suggesting, generated):
    folder = suggesting({**SUGGESTS, "max_new_tokens": 3, "repetition_penalty": 1.1})
    out, _ = generated(folder, "--sampling", "checkpoint", "--temperature", 0.2, "--json", "--seed", 1)
    options = json.loads(out)["options"]
    assert (options["temperature"], options["repetition_penalty"], options["max_new_tokens"]) == (0.2, 1.1, 10)
    assert "suggests" not in generated(folder, "--temperature", 0.2)[1]


def test_the_length_that_the_checkpoint_suggests(suggesting, capsys):
    folder = suggesting({"max_new_tokens": 3})
    assert run(["generate", str(folder), PROMPT, "-e", "cpu", "--sampling", "checkpoint", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"][0]["tokens"]) == 3


def test_a_checkpoint_that_does_not_sample_stays_greedy(suggesting, package, generated):
    folder = suggesting({"do_sample": False, "temperature": 0.7, "top_k": 20})
    text, err = generated(folder, "--sampling", "checkpoint")
    assert text == generated(package)[0]
    assert "suggests" not in generated(folder)[1]


def test_settings_that_partita_does_not_have_are_named(suggesting, generated):
    folder = suggesting({**SUGGESTS, "num_beams": 4, "no_repeat_ngram_size": 3})
    err = generated(folder, "--sampling", "checkpoint")[1]
    assert "num_beams 4, no_repeat_ngram_size 3, which Partita does not support" in err


def test_settings_that_a_greedy_text_of_transformers_has_are_named(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"no_repeat_ngram_size": 3}')
    _, notes = complete_sampling_for(Sampling(), tmp_path, hints=True)
    assert notes == ("the checkpoint sets no_repeat_ngram_size 3, which Partita does not support",)


@pytest.mark.parametrize("given", ["5,,6", ",5", "5,", "5, ,6", "٥,6", "1_0", "+5", "0x5", "5.0"])
def test_what_is_no_list_of_token_ids_is_refused(given):
    with pytest.raises(UsageError, match="is not a list of token ids such as 1,45,7"):
        parse_ids(given)


@pytest.mark.parametrize("given", ["5,6,7", "5, 6, 7", " 5 6\t7\n", "5,6 7"])
def test_token_ids_are_between_commas_or_blanks(given):
    assert parse_ids(given) == [5, 6, 7]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", 101),
        ("repetition_penalty", True),
    ],
)
def test_a_value_that_is_none_is_an_error_only_when_it_is_asked_for(suggesting, generated, name, value):
    folder = suggesting({**SUGGESTS, name: value})
    generated(folder)
    _, err = generated(folder, "--sampling", "checkpoint", code=1)
    assert f"generation_config.json: {name} is {value!r}" in err and err.count("\n") == 1


def test_another_sampling_is_refused(package, generated):
    assert "--sampling mine: the only value is checkpoint" in generated(package, "--sampling", "mine", code=2)[1]


def test_the_least_temperature_is_nearly_greedy_and_one_below_it_an_error(package, generated):
    assert generated(package, "-t", 0.001, "--seed", 1)[0] == generated(package)[0]
    assert (
        "--temperature is 1e-320; it must be 0 (greedy) or from 0.001 to 100"
        in generated(package, "-t", 1e-320, code=2)[1]
    )
