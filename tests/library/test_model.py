"""`partita.load` and models: generation, chat, verification, closing and errors."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import partita
from partita.foreign.folder import open_folder
from partita.library.batches.journal import contents_hash
from partita.library.engine.local import LocalEngine
from partita.runtime.ort.binding import Binding
from tests.commands.test_cli import spoil_known_answer
from tests.commands.test_place import press_ctrl_c
from tests.conftest import REPOSITORY
from tests.foreign.test_any_decoder import LOOKED_UP, folder_of
from tests.runtime.handmade_packages import handmade

PROMPT = [5, 6, 7]
N = 6


@pytest.fixture
def model(package):
    with partita.load(package, providers="cpu") as loaded:
        yield loaded


def tokens(model, prompt=PROMPT, **options):
    return model.generate(prompt, max_new_tokens=N, stop_token_ids=(), **options).run().tokens


# --- generating ------------------------------------------------------------------------------------------------------


def test_steps_add_up_to_completion(model):
    generation = model.generate("return the value", max_new_tokens=N, stop_token_ids=())
    steps = list(generation)
    assert [step.index for step in steps] == list(range(len(steps))) and steps[0].phase == "prefill"
    assert "".join(step.text for step in steps) == generation.text == generation.texts[0]
    (answer,) = generation.results
    assert answer.tokens == tuple(token for step in steps for token in step.tokens[0]) and len(answer.tokens) == N
    assert answer.finish_reason == generation.finish_reason == steps[-1].finish_reasons[0] == "length"
    assert 0 < generation.timings["decode_steps"] < N, "steps that were profiled do not count"
    assert answer.text == model.decode(answer.tokens)


def test_stop_token_is_in_tokens_but_not_in_text(model):
    whole = model.generate(PROMPT, max_new_tokens=1, stop_token_ids=()).run()
    assert whole.text, "it has a text"
    cut = model.generate(PROMPT, max_new_tokens=N, stop_token_ids=whole.tokens[0]).run()
    assert (cut.tokens, cut.finish_reason, cut.text) == (whole.tokens, "stop", "")


def test_sampling_options_apply_per_row(pair):
    with partita.load(pair, providers="cpu") as model:
        prompts = [PROMPT, PROMPT]
        greedy = tokens(model, prompts)
        one = partita.Sampling(temperature=2.0, seed=3)
        mixed = tokens(model, prompts, sampling=[one, partita.Sampling()])
        assert mixed[1] == greedy[1] and mixed[0] != greedy[0]
        same = tokens(model, prompts, sampling=[one, one])
        assert same[0] == same[1] == mixed[0]
        apart = tokens(model, prompts, sampling=one)
        assert apart == (same[0], tokens(model, [PROMPT], sampling=replace(one, seed=4))[0]), "seed + index"
        lengths = [partita.Sampling(max_new_tokens=2), partita.Sampling(max_new_tokens=4)]
        short = model.generate(prompts, sampling=lengths, stop_token_ids=()).run()
        assert [len(answer.tokens) for answer in short.results] == [2, 4]
        report = model.report()
        assert report.request.options["temperature"] == "0" and all(check.passed for check in report.checks)
        model.generate(prompts, max_new_tokens=2, sampling=[one, partita.Sampling()]).run()
        assert model.report().request.options["temperature"] == "2 / 0"


def test_chat_renders_messages_with_template(model):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the list"}]
    generation = model.chat(messages, max_new_tokens=2)
    with_template = "<|system|>be brief\n<|user|>the list\n<|assistant|>"
    assert model.decode(generation.progress.tickets[0].work.prompt) == with_template
    assert model.chat("the list", max_new_tokens=2).run().tokens == (
        model.chat([messages[1]], max_new_tokens=2).run().tokens
    )


def test_mismatch_with_reference_logits_raises_verification_error(package, own_copy):
    folder = own_copy(package)
    spoil_known_answer(folder)
    with partita.load(folder, providers="cpu") as model, pytest.raises(partita.VerificationError) as caught:
        model.verify()
    assert caught.value.verification.steps and isinstance(caught.value, partita.ParityError)


# --- how it ends -----------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_only_current_generation(model, monkeypatch):
    expected = tokens(model)
    generation = model.generate(PROMPT, max_new_tokens=N, stop_token_ids=())
    next(generation)
    next(generation)
    with monkeypatch.context() as patch:
        patch.setattr("partita.runtime.ort.session.Binding.run", press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            next(generation)
    assert list(generation) == [] and generation.finish_reason == "interrupted"
    report = model.report()
    assert report.totals is not None and report.totals.finish_reason == "interrupted"
    assert all(check.passed for check in report.checks)
    assert tokens(model) == expected


def test_partita_profiles_variable_saves_onnx_runtime_profiles(package, tmp_path, monkeypatch):
    monkeypatch.setenv("PARTITA_PROFILES", str(tmp_path / "profiles"))
    with partita.load(package, providers="cpu") as other:
        other.generate(PROMPT, max_new_tokens=3, stop_token_ids=()).run()
        other.report()
    (profile,) = (tmp_path / "profiles").iterdir()
    assert any(event.get("cat") == "Node" for event in json.loads(profile.read_text()))


def test_report_marks_profiled_runs_of_earlier_generation(package):
    """A session is profiled once; phases profiled only in an earlier generation are marked."""
    with partita.load(package, providers="cpu") as other:
        other.generate(PROMPT, max_new_tokens=3, stop_token_ids=()).run()
        other.generate(list(range(40)), max_new_tokens=2, stop_token_ids=()).run()
        report = other.report()
        assert [phase.observed_runs for phase in report.phases] == [1, 1]
        assert not any("earlier" in text for text in (*report.notes, *(phase.timing_note for phase in report.phases)))
        tokens(other)
        report = other.report()
        assert [phase.observed_runs for phase in report.phases] == [2, 3]
        assert all("of an earlier generation" in phase.timing_note for phase in report.phases)
        assert any("the profiled runs of prefill and decode are of an earlier generation" in n for n in report.notes)
        assert all(check.passed for check in report.checks)


def test_abandoned_generation_is_reported_as_interrupted(model):
    expected = tokens(model)
    for step in model.generate(PROMPT, max_new_tokens=N, stop_token_ids=()):
        if step.index == 2:
            break
    report = model.report()
    assert report.totals is not None
    assert (report.totals.finish_reason, report.totals.new_tokens) == ("interrupted", 3)
    assert tokens(model) == expected
    assert model.report().totals.finish_reason == "length"


def test_prompts_beyond_batch_size_complete_in_order(package, pair):
    prompts = [[5 + index, 6] for index in range(7)]
    found = []
    opened: list[tuple[Path, Any]] = [(package, "this"), (pair, "this"), (pair, "child")]
    for folder, process in opened:
        with partita.load(folder, "cpu", process=process) as model:
            drawn = model.generate(prompts, max_new_tokens=4, stop_token_ids=(), temperature=1.0, seed=5).run()
            found.append((drawn.texts, model.generate(prompts, max_new_tokens=4, stop_token_ids=()).tokens))
            report = model.report(probe_seconds=0)
            assert any("7 requests shared the rows" in note for note in report.notes)
    assert found[0] == found[1] == found[2] and len(set(found[0][1])) == 7


def test_concurrent_generations_share_the_batch(model):
    whole = tokens(model)
    first = model.generate(PROMPT, max_new_tokens=N, stop_token_ids=())
    next(first)
    second = model.generate(PROMPT, max_new_tokens=N, stop_token_ids=())
    assert second.text and second.tokens == first.run().tokens == whole
    assert any("2 requests shared the rows" in note for note in model.report(probe_seconds=0).notes)
    first = model.generate(PROMPT, max_new_tokens=N, stop_token_ids=())
    with pytest.raises(partita.GenerationError, match="running with another prefill_chunk"):
        model.generate(PROMPT, max_new_tokens=N, prefill_chunk=2)
    first.close()
    assert first.finish_reason == "interrupted"
    assert model.generate(PROMPT, max_new_tokens=N, prefill_chunk=2, stop_token_ids=()).tokens == whole


@pytest.mark.parametrize("process", ["this", "child"])
def test_threads_sharing_a_model_get_complete_results(package, process):
    with partita.load(package, "cpu", process=process) as model, ThreadPoolExecutor(6) as pool:
        whole = tokens(model)
        assert set(pool.map(lambda _: tokens(model), range(30))) == {whole}


def test_run_error_appears_in_report(model, monkeypatch):
    generation = model.generate(PROMPT, max_new_tokens=N)
    next(generation)
    monkeypatch.setattr(Binding, "run", not_finite)
    with pytest.raises(partita.GenerationError, match="not finite"):
        next(generation)
    monkeypatch.undo()
    report = model.report()
    assert report.totals.finish_reason == "error" and "not finite" in report.totals.finish_detail


def not_finite(*_: object) -> None:
    raise partita.GenerationError("the logits are not finite")


@pytest.mark.parametrize("ids", [[-5], [3, 10**9]])
def test_stop_token_ids_must_be_in_vocabulary(model, ids):
    with pytest.raises(partita.ArgumentError, match=rf"stop_token_ids has {ids[-1]}; the vocabulary has ids 0 to"):
        model.generate(PROMPT, stop_token_ids=ids)
    assert model.generate(PROMPT, max_new_tokens=1, stop_token_ids=[model.vocab_size - 1]).run().tokens


def test_close_frees_session_and_ends_generation(package):
    model = partita.load(package, providers="cpu")
    generation = model.generate(PROMPT, max_new_tokens=N)
    next(generation)
    engine = model.engine
    assert isinstance(engine, LocalEngine)
    session = engine.runner.graphs[0].session
    model.close()
    model.close()
    assert session._native is None
    with pytest.raises(partita.GenerationError, match="this model is closed"):
        next(generation)
    for call in (lambda: model.generate(PROMPT), model.verify, model.report):
        with pytest.raises(partita.PartitaError, match="closed|nothing"):
            call()
    assert "closed" in repr(model)


def test_unreferenced_model_completes_generation_then_closes(package):
    """`partita.load(...).generate(...).run()` holds no reference to the model."""
    model = partita.load(package, providers="cpu")
    engine, whole = weakref.ref(model.engine), tokens(model)

    def is_open() -> bool:
        gc.collect()
        found: Any = engine()
        return found is not None and found._closing.alive

    gc.freeze()  # going through all objects takes seconds
    try:
        generation = model.generate(PROMPT, max_new_tokens=N, stop_token_ids=())
        next(generation)
        del model
        assert is_open() and generation.run().tokens == whole
        assert not is_open()
    finally:
        gc.unfreeze()
    assert generation.tokens == whole, "what it has said stays"


@pytest.mark.parametrize("process", ["this", "child"])
def test_close_ends_requests_and_rejects_new_requests(package, process):
    model = partita.load(package, providers="cpu", process=process)
    scheduler, work = model.scheduler(), partita.request(model, PROMPT, max_new_tokens=N, stop_token_ids=())
    ticket = scheduler.submit(work)
    scheduler.step()
    model.close()
    assert ticket.state == "finished" and ticket.result.finish_reason == "error"
    assert "this model is closed" in str(ticket.error)
    with pytest.raises(partita.GenerationError, match="this model is closed"):
        scheduler.submit(work)


# --- threads and output ----------------------------------------------------------------------------------------------


def test_program_signal_handlers_and_descriptors_are_unchanged(package):
    """`os.dup2` and `signal.signal` are not called, because other threads would see the change."""
    script = f"""
import os, signal, sys, threading
import partita
def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return handlers, [(os.fstat(n).st_dev, os.fstat(n).st_ino) for n in (0, 1, 2)]
before, called = state(), []
os.dup2 = lambda *given: called.append(given)
signal.signal = lambda *given: called.append(given)
def work(process):
    with partita.load({str(package)!r}, providers=["cpu"], process=process) as model:
        model.generate([5, 6], max_new_tokens=3, temperature=0.0, top_k=3).run()
        assert all(check.passed for check in model.report().checks)
        model.verify()
threads = [threading.Thread(target=work, args=("auto",)) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
work("auto")
work("child")
partita.place({str(package)!r}, providers="cpu", process="auto")
try:
    partita.load("nowhere")
except partita.PackageError:
    pass
assert (state(), called) == (before, []), called
print("still here")
print("and here", file=sys.stderr)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "still here\n", "and here\n")


# --- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` is 0; it must be"),
        ({"temperature": "hot"}, "`temperature` is 'hot'; it must be a number"),
        ({"temperature": -1.0}, "`temperature` is -1.0; it must be 0 (greedy) or from 0.001 to 100"),
        ({"top_k": 1.5}, "`top_k` is 1.5; it must be an integer"),
        ({"sampling": "mine"}, "`sampling=mine`: the only value is checkpoint"),
        ({"sampling": [partita.Sampling(), partita.Sampling()]}, "a list with a Sampling for each prompt (1)"),
        ({"sampling": partita.Sampling(top_p=2.0)}, "`top_p` is 2.0"),
        ({"prefill_chunk": 0}, "`prefill_chunk` is 0"),
        ({"prompts": b"bytes"}, "prompts is of type bytes"),
        ({"prompts": [{"role": "user"}]}, "a prompt is"),
        ({"stop": ""}, "`stop` is empty"),
        ({"prompts": "a\ud83d"}, "an unpaired surrogate, '\\ud83d', at position 1"),
    ],
)
def test_invalid_generate_argument_raises_argument_error(model, arguments, says):
    with pytest.raises(partita.ArgumentError) as caught:
        model.generate(**{"prompts": PROMPT, **arguments})
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, TypeError)


def test_errors_pickle_and_copy_with_all_fields(model):
    """A process pool breaks on an exception that cannot be unpickled."""
    with pytest.raises(partita.GenerationError) as too_many:
        model.generate([])
    tokens(model)
    with pytest.raises(partita.CheckFailedError) as failed:
        model.report().check("provider=webgpu,share=1")
    for error in (too_many.value, failed.value, partita.ArgumentError("a", path=Path("b"))):
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is type(error) and str(again) == str(error) and again.args == error.args
            assert (again.message, again.path, again.remedy) == (error.message, error.path, error.remedy)
    assert pickle.loads(pickle.dumps(failed.value)).result == failed.value.result


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"providers": []}, "`providers` is empty"),
        ({"providers": "no-such"}, "`providers`: unknown provider 'no-such'"),
        ({"providers": "cpu", "threads": 0}, "`threads` is 0"),
        ({"providers": "cpu", "pins": "cpu:lm_head"}, "`pins` must be a list of strings, not the string 'cpu:lm_head'"),
        ({"providers": "cpu", "process": "other"}, "process is 'other'; it must be 'auto', 'this' or 'child'"),
        ({"providers": "cpu", "provider_options": {"cpu": {"nope": 1}}}, "has no option 'nope'"),
        ({"providers": [("cpu", {"nope": 1})]}, "has no option 'nope'"),
    ],
)
def test_invalid_load_argument_raises_argument_error(package, arguments, says):
    with pytest.raises(partita.ArgumentError) as caught:
        partita.load(package, **arguments)
    assert says in str(caught.value)


@pytest.mark.parametrize("process", ["this", "child"])
def test_generate_file_writes_completions_and_row_errors(package, tmp_path, process):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("return the\n\nreturn the value\n")
    heard: list[tuple[int, int | None]] = []
    with partita.load(package, "cpu", process=process) as model:
        done = partita.generate_file(
            model, source, out, max_new_tokens=5, stop_token_ids=(), progress=lambda *far: heard.append(far)
        )
        expected = model.generate("return the", max_new_tokens=5, stop_token_ids=()).run().text
        with pytest.raises(partita.ArgumentError, match=r"`output=.*`: exists already"):
            partita.generate_file(model, source, out)
        out.unlink()
        partita.generate_file(model, source, out, max_new_tokens=5, stop_token_ids=())
        assert any("2 requests shared the rows" in note for note in model.report(probe_seconds=0).notes)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["text"] for row in rows][:2] == [expected, None] and "empty" in rows[1]["error"]
    assert (done.rows, done.errors, done.resumed) == (3, 1, 0) and heard[-1] == (3, 3)


@pytest.mark.parametrize("batch", [1, 2])
def test_closed_model_stops_generate_file_and_rerun_resumes(tiny_checkpoint, exported, tmp_path, batch):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"tokens": [5, 6, 7 + index], "max_new_tokens": 2 + 5 * (index == 1)} for index in range(5)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = exported(tiny_checkpoint("llama"), batch_size=batch)
    with partita.load(folder, "cpu") as model:

        def progress(done: int, total: int | None) -> None:
            if done == 1:
                model.close()

        with pytest.raises(partita.GenerationError, match="is closed"):
            partita.generate_file(model, source, out, stop_token_ids=(), progress=progress)
    assert not out.exists()
    with partita.load(folder, "cpu") as model:
        done = partita.generate_file(model, source, out, stop_token_ids=())
    assert (done.rows, done.errors, done.resumed) == (5, 0, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.parametrize("process", ["this", "child"])
def test_forked_model_raises_and_parent_continues(package, process):
    with partita.load(package, "cpu", process=process) as model:
        begun = model.generate("return the", max_new_tokens=4, stop_token_ids=())
        pid = os.fork()
        if not pid:
            said = []
            for use in (lambda: model.generate("return the", max_new_tokens=1), lambda: next(begun), model.close):
                try:
                    use()
                except partita.PartitaError as error:
                    said.append("before this process was forked" in str(error))
            os._exit(said != [True, True])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(begun.run().tokens[0]) == 4


def test_relative_package_paths_survive_chdir(package, own_copy, monkeypatch, tmp_path):
    """Stop tokens are read from the package in every call."""
    folder = own_copy(package)
    monkeypatch.chdir(folder.parent)
    with partita.load(folder.name, providers="cpu") as model:
        first = model.generate(PROMPT, max_new_tokens=N, stop_token_ids=()).run().tokens[0]
        config = folder / "generation_config.json"  # of the size that the manifest says
        config.write_text(json.dumps({"eos_token_id": first[2]}).ljust(config.stat().st_size))
        monkeypatch.chdir(tmp_path)
        ended = model.generate(PROMPT, max_new_tokens=N).run()
        assert (ended.tokens[0], ended.finish_reason) == (first[:3], "stop")
        guessed = model.generate(PROMPT, max_new_tokens=N, draft=os.path.relpath(folder)).run()
        assert guessed.tokens == ended.tokens


# What a run over a file goes on with: only with what gives the same answers, in folders of other exporters too


@pytest.mark.parametrize("foreign", [False, True])
def test_contents_hash_depends_only_on_files_affecting_output(tmp_path: Path, foreign: bool) -> None:
    folder = folder_of(LOOKED_UP, tmp_path / "odd") if foreign else handmade(tmp_path / "package")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))

    def hash_of(folder: Path) -> str:
        return contents_hash(folder, open_folder(folder))

    seen = [hash_of(folder)]
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere")
    for path in elsewhere.rglob("*"):
        os.utime(path, (0, 0))
    assert hash_of(elsewhere) == seen[0], "of a copy, on another machine say, it is the same"
    (folder / "notes.txt").write_text("no part of it")
    assert hash_of(folder) == seen[0]
    for name, content in (("generation_config.json", json.dumps({"eos_token_id": 3})), ("tokenizer.json", "{}")):
        (folder / name).write_text(content)
        seen.append(hash_of(folder))
    if foreign:  # another folder is copied over it: the model has the same size and time
        path = folder / "decoder.onnx"
        stat, data = path.stat(), path.read_bytes()
        assert data.count(b"memory_in_7") and data.count(b"memory_out_7")
        path.write_bytes(data.replace(b"memory_in_7", b"memory_in_8").replace(b"memory_out_7", b"memory_out_8"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert path.stat().st_size == stat.st_size
        seen.append(hash_of(folder))
    assert len(set(seen)) == len(seen) == 3 + foreign
