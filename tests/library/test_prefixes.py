"""`model.save_prefix` and `prefix=`: programs have what the command line has."""

from __future__ import annotations

from pathlib import Path

import pytest

import partita

BEGIN, REST, SYSTEM = "return the value of the", " item in", "return the item"


@pytest.mark.parametrize("process", ["this", "child"])
def test_a_prefix_spares_reading_and_changes_no_answer(package: Path, tmp_path: Path, process) -> None:
    text, system, ids = (tmp_path / name for name in ("text", "system", "ids"))
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "the"}]
    with partita.load(package, providers="cpu", threads=1, process=process, observe=False) as model:
        model.save_prefix(text, BEGIN)
        model.save_prefix(system, system=SYSTEM)
        model.save_prefix(ids, model.encode(BEGIN))
        whole, talk = (
            model.generate(BEGIN + REST, max_new_tokens=6).run(),
            model.chat(said, max_new_tokens=6).run(),
        )
        for generation, wanted in (
            (model.generate(REST, prefix=text, max_new_tokens=6).run(), whole),
            (model.chat(said, prefix=str(system), max_new_tokens=6).run(), talk),
            (model.generate("the", prefix=system, max_new_tokens=6).run(), talk),
        ):
            assert generation.tokens == wanted.tokens
            assert generation.timings["prompt_tokens"] < wanted.timings["prompt_tokens"]
        rest = model.generate([5, 6], prefix=ids, max_new_tokens=6).run()
        assert rest.tokens == model.generate([*model.encode(BEGIN), 5, 6], max_new_tokens=6).run().tokens


def test_a_report_of_what_goes_on_with_a_prefix_adds_up(pair: Path, tmp_path: Path) -> None:
    with partita.load(pair, providers="cpu", threads=1, observe=False) as model:
        model.save_prefix(tmp_path / "prefix", [5, 6, 7, 8, 9, 10])
    with partita.load(pair, providers="cpu", threads=1) as model:
        rows = model.generate([[11, 12], [13]], prefix=tmp_path / "prefix", max_new_tokens=6, stop_token_ids=()).run()
        assert rows.timings["prompt_tokens"] == 3, "the others were not read"
        assert [check for check in model.report().checks if not check.passed] == []


def test_what_makes_no_sense_is_refused(package: Path, tmp_path: Path) -> None:
    with partita.load(package, providers="cpu", threads=1, observe=False) as model:
        for text, system in ((None, None), ("a", "b")):
            with pytest.raises(partita.ArgumentError, match="a prefix contains one text"):
                model.save_prefix(tmp_path / "f", text, system=system)
        with pytest.raises(partita.ArgumentError, match="inside"):
            model.save_prefix(package / "f", "a")
        with pytest.raises(partita.GenerationError, match="not a readable prefix"):
            model.generate("a", prefix=tmp_path / "f")
        with pytest.raises(partita.GenerationError, match="is empty"):
            model.save_prefix(tmp_path / "f", [])
    assert not list(tmp_path.iterdir())


def test_a_prefix_whose_logits_are_no_numbers_is_not_written(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with partita.load(package, providers="cpu", threads=1, observe=False) as model:
        with monkeypatch.context() as patch:
            patch.setattr("partita.runtime.generate.loop.np.isfinite", lambda value: False)
            with pytest.raises(partita.GenerationError, match="not finite"):
                model.save_prefix(tmp_path / "prefix", BEGIN)
        assert not (tmp_path / "prefix").exists()
        assert model.generate(BEGIN, max_new_tokens=3).run().tokens
