"""Experiments in a child process: crashes, hangs, budgets, providers that do not start; none of them ends ours."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import psutil
import pytest
from onnx import numpy_helper

from partita.observations.facts import AssignedNode
from partita.providers.generic import generic_provider, parse_libraries, split_libraries
from partita.providers.resolve import Resolution, all_names, known_providers
from partita.runtime.ort.session import NativeFailureError
from partita.runtime.probes import child, lab
from partita.runtime.probes.cache import Cache
from partita.runtime.probes.cases import ZEROS, zeros
from partita.runtime.probes.lab import Answer, Lab, Turn, write_models
from tests.conftest import require
from tests.runtime.test_provider_check import compiled

if TYPE_CHECKING:
    from partita.runtime.ort.session import Session

CUDA = Resolution(known_providers()["cuda"], "active")


def outcomes(answers):
    return [answer.outcome if answer is not None else None for answer in answers]


def test_answers_come_in_the_order_of_the_models(bench, model):
    here = bench.lab()
    answers = here.try_all([model("one"), model("left"), model("two")])
    assert outcomes(answers) == ["taken", "left", "taken"]
    assert answers[1] and answers[1].said == "no kernel"
    assert (here.experiments, here.cached, here.crashes) == (3, 0, 0) and bench.batches == [3]


def test_what_a_taken_model_makes_needless_is_not_tried(bench, model):
    here = bench.lab()
    names = ["left", "one", "beside", "later", "left again", "left last"]
    turns = [Turn(0, 0), Turn(0, 1), Turn(0, 1), Turn(0, 2), Turn(1, 0), Turn(1, 1)]
    answers = here.try_all([model(name) for name in names], turns=turns)
    assert outcomes(answers) == ["left", "taken", "taken", None, "left", "left"]
    assert here.experiments == 5


def test_a_model_for_two_nodes_is_tried_while_one_of_them_needs_it(bench, model):
    here = bench.lab()
    models = [model("one"), model("shared"), model("left"), model("shared"), model("last")]
    turns = [Turn(0, 0), Turn(0, 1), Turn(1, 0), Turn(1, 1), Turn(0, 2)]
    assert outcomes(here.try_all(models, turns=turns)) == ["taken", "taken", "left", "taken", None]


def test_known_answers_make_others_needless_too(bench, model, tmp_path):
    cache = Cache(tmp_path / "answers.json")
    bench.lab(cache=cache).try_all([model("one")])
    again = bench.lab(cache=cache)
    assert outcomes(again.try_all([model("one"), model("two")], turns=[Turn(0, 0), Turn(0, 1)])) == ["taken", None]
    assert (again.experiments, again.cached) == (0, 1)


def test_the_same_model_is_tried_once(bench, model):
    here = bench.lab()
    assert outcomes(here.try_all([model("one"), model("one")])) == ["taken", "taken"]
    assert here.experiments == 2 and bench.batches == [1], "both variants count, as in the table of their node"


def test_a_crash_is_an_answer_and_the_next_models_are_answered_too(bench, model):
    here = bench.lab()
    answers = here.try_all([model("one"), model("crash"), model("two"), model("left")])
    assert outcomes(answers) == ["taken", "crashed", "taken", "left"]
    assert answers[1] and "killed by SIGSEGV" in answers[1].said
    assert "its last output: assertion failed in the driver" in answers[1].said
    assert here.crashes == 1 and not here.unusable


def test_a_crash_counts_only_when_a_fresh_process_crashes_too(bench, model):
    """A model that leaves damage behind must not put the blame on the one after it."""
    here = bench.lab()
    assert outcomes(here.try_all([model("poison"), model("innocent"), model("two")])) == ["taken"] * 3
    assert here.crashes == 0 and bench.batches == [3, 2]


def test_an_end_without_a_signal_is_a_crash_as_well(bench, model):
    (answer,) = bench.lab().try_all([model("leave")])
    assert answer and answer.outcome == "crashed" and "ended with exit code 3" in answer.said


def test_a_model_that_hangs_is_ended_by_the_alarm_and_the_next_are_answered(bench, model, monkeypatch):
    monkeypatch.setattr(lab, "MODEL_SECONDS", 0.4)
    here = bench.lab()
    began = time.monotonic()
    answers = here.try_all([model("one"), model("hang"), model("two")])
    assert outcomes(answers) == ["taken", "timed_out", "taken"]
    assert answers[1] and answers[1].said == "no answer within 1.2 s", "it was tried again, with more time"
    assert time.monotonic() - began < 30 and here.crashes == 0


def test_a_slow_machine_changes_no_answer(bench, model, monkeypatch):
    """What is late is tried again once the others are answered, by itself and with more time."""
    monkeypatch.setattr(lab, "MODEL_SECONDS", 1.0)
    here = bench.lab()
    answers = here.try_all([model("one"), model("slow-left"), model("two"), model("slow")])
    assert outcomes(answers) == ["taken", "left", "taken", "taken"]
    assert here.experiments == 4 and here.crashes == 0
    assert bench.batches == [4, 2, 2, 2], "one and the late one, two and the late one, then each of them alone"


def test_a_late_model_is_not_tried_again_without_time(bench, model, monkeypatch):
    monkeypatch.setattr(lab, "MODEL_SECONDS", 0.4)
    here = bench.lab(seconds=20.0)
    monkeypatch.setattr(lab, "LEAST_SECONDS", 15.0)  # what is left once the late one was ended
    assert outcomes(here.try_all([model("hang")])) in (["timed_out"], [None])


def test_a_hang_is_tried_again_next_time_and_a_crash_is_not(bench, model, monkeypatch, tmp_path):
    monkeypatch.setattr(lab, "MODEL_SECONDS", 0.4)
    cache = Cache(tmp_path / "answers.json")
    bench.lab(cache=cache).try_all([model("hang"), model("crash")])
    cache.save()
    again = bench.lab(cache=Cache(tmp_path / "answers.json"))
    assert outcomes(again.try_all([model("hang"), model("crash")])) == ["timed_out", "crashed"]
    assert (again.experiments, again.cached, again.crashes) == (1, 1, 0)


def test_what_the_system_killed_is_tried_again_next_time_and_a_crash_is_not(bench, model, tmp_path):
    """It does so where memory runs out, which may be another's doing."""
    cache = Cache(tmp_path / "answers.json")
    bench.lab(cache=cache).try_all([model("kill"), model("crash")])
    cache.save()
    again = bench.lab(cache=Cache(tmp_path / "answers.json"))
    assert outcomes(again.try_all([model("kill"), model("crash")])) == ["crashed", "crashed"]
    assert (again.experiments, again.cached) == (1, 1)


@pytest.mark.parametrize(
    ("outcome", "said", "kept"),
    [
        ("failed", "CUDA failure 2: out of memory ; GPU=0 ; hostname=x", False),
        ("failed", "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=x", False),
        ("failed", "Exception during initialization: std::bad_alloc", False),
        ("crashed", "its process was killed by SIGABRT; its last output: what():  std::bad_alloc", False),
        ("crashed", "its process was killed by SIGSEGV", True),
        ("failed", "opset 22 is not known to the device compiler", True),
        ("left", "no kernel that computes out of memory", True),
    ],
)
def test_a_failure_for_want_of_memory_is_tried_again_next_time_and_no_other(bench, outcome, said, kept):
    here = bench.lab()
    here.keep("node:a", Answer(outcome, said), {})
    assert (here.cache.get("node:a") is not None) is kept


def test_without_time_nothing_is_started_and_what_is_known_is_still_told(bench, model, tmp_path):
    cache = Cache(tmp_path / "answers.json")
    bench.lab(cache=cache).try_all([model("one")])
    before = bench.batches
    late = bench.lab(seconds=0.0, cache=cache)
    assert outcomes(late.try_all([model("one"), model("two")])) == ["taken", None]
    assert bench.batches == before and not late.unusable


def test_a_budget_that_runs_out_leaves_the_rest_unanswered_and_blames_nobody(bench, model):
    here = bench.lab(seconds=3.0)
    began = time.monotonic()
    answers = here.try_all([model("one"), model("hang"), model("two")])
    assert outcomes(answers) == ["taken", None, None]
    assert time.monotonic() - began < 20
    assert here.crashes == 0 and not here.unusable


def test_a_budget_that_runs_out_while_the_provider_starts_blames_nobody(bench, model):
    bench.mode("sleep")
    here = bench.lab(seconds=1.5)
    assert here.try_all([model("one")]) == [None]
    assert here.unusable == ""


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("refuse", "device_missing: no adapter"),
        ("abort", "was killed by SIGABRT while it started"),
        ("sleep", "did not start within 0.5 s"),
    ],
)
def test_a_provider_that_does_not_start_is_asked_once(bench, model, monkeypatch, mode, says):
    monkeypatch.setattr(lab, "START_SECONDS", 0.5)
    bench.mode(mode)
    here = bench.lab()
    assert here.try_all([model("one"), model("two")]) == [None, None]
    assert says in here.unusable and here.experiments == 0
    assert here.try_all([model("three")]) == [None]
    assert len(bench.batches) == 1


def test_whether_a_provider_starts_is_found_out_with_a_model_that_all_take(bench):
    assert bench.lab().starts()
    bench.mode("abort")
    assert not bench.lab().starts()


def test_nothing_is_left_behind(bench, model, monkeypatch, tmp_path):
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    bench.lab().try_all([model("one"), model("crash"), model("leave")])
    assert list(folder.iterdir()) == []


# --- one child for several batches ---------------------------------------------------------------------------------


def test_in_its_context_one_child_answers_all_batches(bench, model):
    with bench.lab() as here:
        assert outcomes(here.try_all([model("one"), model("left")])) == ["taken", "left"]
        assert outcomes(here.try_all([model("two")])) == ["taken"]
        (pid,) = bench.processes
        assert psutil.pid_exists(pid) and bench.batches == [2, 1]
    assert not psutil.pid_exists(pid)
    assert outcomes(here.try_all([model("three")])) == ["taken"], "outside of it, each batch has a child of its own"
    assert len(bench.processes) == 2 and not any(map(psutil.pid_exists, bench.processes))


def test_a_batch_before_puts_no_blame_on_a_model_of_the_next(bench, model):
    with bench.lab() as here:
        assert outcomes(here.try_all([model("poison")])) == ["taken"]
        assert outcomes(here.try_all([model("innocent"), model("two")])) == ["taken", "taken"]
        assert here.crashes == 0 and len(bench.processes) == 2


def test_a_crash_in_a_kept_child_is_one_when_it_comes_again_in_a_fresh_one(bench, model):
    with bench.lab() as here:
        here.try_all([model("one")])
        assert outcomes(here.try_all([model("crash"), model("two")])) == ["crashed", "taken"]
        assert here.crashes == 1 and len(bench.processes) == 3


def test_a_child_that_dies_between_batches_is_replaced(bench, model):
    with bench.lab() as here:
        assert outcomes(here.try_all([model("last words")])) == ["taken"]
        time.sleep(0.6)
        assert outcomes(here.try_all([model("two")])) == ["taken"]
        assert here.crashes == 0 and not here.unusable


def test_a_late_model_gets_a_fresh_child(bench, model, monkeypatch):
    monkeypatch.setattr(lab, "MODEL_SECONDS", 0.4)
    with bench.lab() as here:
        here.try_all([model("one")])
        assert outcomes(here.try_all([model("hang"), model("two")])) == ["timed_out", "taken"]
        assert bench.batches == [1, 2, 1, 2] and here.crashes == 0


def test_the_answers_are_saved_and_the_child_ended_when_somebody_interrupts(bench, model, tmp_path):
    cache = Cache(tmp_path / "answers.json")

    def interrupted() -> None:
        with bench.lab(cache=cache) as here:
            here.try_all([model("one")])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not any(map(psutil.pid_exists, bench.processes)) and len(bench.processes) == 1
    again = bench.lab(cache=Cache(tmp_path / "answers.json"))
    assert outcomes(again.try_all([model("one")])) == ["taken"] and again.cached == 1


def test_large_constants_are_holes_in_one_file(model, tmp_path):
    small, large = model("small"), model("large")
    for proto, size in ((small, 1 << 20), (large, 1 << 24)):
        proto.graph.initializer.append(zeros("w", 1, [size]))
    write_models(tmp_path, {"a": small, "b": large})
    assert (tmp_path / ZEROS).stat().st_size == 1 << 26
    assert (tmp_path / ZEROS).stat().st_blocks * 512 < 1 << 20, "a sparse file"
    values = numpy_helper.to_array(large.graph.initializer[0], str(tmp_path))
    assert values.shape == (1 << 24,) and not np.any(values[:100])


def test_the_tests_keep_out_of_the_users_cache(own_cache):
    from partita.paths import cache_folder

    assert cache_folder("probes") == own_cache / "probes"


# --- real children -------------------------------------------------------------------------------------------------


def library_lab(path: Path, seconds: float = 60.0) -> Lab:
    """A lab whose provider is a plugin library."""
    mine = Resolution(generic_provider("MineExecutionProvider"), "active", library=path)
    return Lab(mine, Cache(None), time.monotonic() + seconds)


def test_a_plugin_library_that_crashes_is_a_finding(model, tmp_path):
    source = (
        "#include <stdio.h>\n#include <stdlib.h>\n__attribute__((constructor)) static void boom(void)"
        '{ fputs("assertion failed: device != null\\n", stderr); abort(); }'
    )
    here = library_lab(compiled(tmp_path, source))
    assert here.try_all([model("one"), model("two")]) == [None, None]
    assert "killed by SIGABRT while it started" in here.unusable
    assert not here.starts()


def test_a_plugin_library_that_hangs_is_ended_by_the_alarm(model, tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "START_SECONDS", 2.0)
    source = "#include <unistd.h>\n__attribute__((constructor)) static void wait(void) { for (;;) pause(); }"
    here = library_lab(compiled(tmp_path, source))
    began = time.monotonic()
    assert here.try_all([model("one")]) == [None]
    assert "did not start within 2 s" in here.unusable and time.monotonic() - began < 30


def test_a_library_that_is_no_plugin_is_told_in_the_loaders_words(model, tmp_path):
    here = library_lab(compiled(tmp_path, "int nothing(void) { return 0; }"))
    assert here.try_all([model("one")]) == [None]
    assert "undefined symbol: CreateEpFactories" in here.unusable


def test_a_plugin_library_is_asked_under_whatever_name_it_was_given(model, tmp_path):
    path = compiled(tmp_path, "int nothing(void) { return 0; }")
    (mine,) = parse_libraries(split_libraries([f"myep={path}"]), all_names())
    here = Lab(Resolution(mine, "active", library=mine.library), Cache(None), time.monotonic() + 60)
    assert here.try_all([model("one")]) == [None]
    assert "undefined symbol: CreateEpFactories" in here.unusable, "its name is no reason not to load it"


def test_a_provider_without_its_libraries_fails_over_everything(model):
    from partita.runtime.ort.registry import available_ort_names

    require("onnxruntime-gpu", CUDA.provider.ort_name in available_ort_names())
    require("a machine without an NVIDIA driver", shutil.which("nvidia-smi") is None)
    here = Lab(CUDA, Cache(None), time.monotonic() + 60)
    (answer,) = here.try_all([model("one")])
    assert answer and answer.outcome == "failed" and not here.starts()


# --- what the child makes of a session that cannot be opened -------------------------------------------------------

NOT_FOUND = (
    "[I:onnxruntime:, cuda_execution_provider.cc:1 GetCapability] CUDA kernel not found in registries for Op "
    "type: Scaler node name: probe"
)


def failure(kind: str, text: str, *log: str) -> NativeFailureError:
    return NativeFailureError(type(kind, (Exception,), {})(text), log)


@pytest.mark.parametrize(
    ("kind", "text", "outcome"),
    [
        ("NotImplemented", "Could not find an implementation for Scaler(1) node with name 'probe'", "left"),
        ("InvalidGraph", "This is an invalid model. Type Error: …", "invalid"),
        ("Fail", "Node (probe) Op (MaxPool) [ShapeInferenceError] Attribute strides has incorrect size", "invalid"),
        ("EPFail", "opset 22 is not known to the device compiler", "failed"),
        (
            "RuntimeException",
            "Exception during initialization: /x/core/providers/openvino/backend.cc:1 it broke",
            "failed",
        ),
        ("RuntimeException", "Exception during initialization: /x/core/providers/cpu/ml/scaler.cc:69 no scale", "left"),
        ("RuntimeException", "Exception during initialization: /x/core/providers/cpu/nn/conv.h:43 no shape", "failed"),
    ],
)
def test_whose_fault_it_is_that_a_model_cannot_be_opened(kind, text, outcome):
    found = child.failed(failure(kind, text), CUDA, one_node=True, legal=lambda: False)
    assert found.outcome == outcome and found.said


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("probe", "CUDA kernel not found in registries for Op type: Loop"),
        ("another", "CUDA kernel not found in registries for Op type: Selu node name: inner"),
    ],
)
def test_what_is_said_of_the_node_goes_before_what_is_said_of_one_in_its_body(node, said):
    head = "[I:onnxruntime:, cuda.cc:1 GetCapability] CUDA kernel not found in registries for Op type"
    log = (f"{head}: Selu node name: inner", f"{head}: Loop node name: {node}")
    broken = failure("NotImplemented", "nobody has it", *log)
    assert child.failed(broken, CUDA, one_node=True, legal=lambda: True) == child.Found("left", said)


def test_a_kernel_that_breaks_after_the_provider_left_the_node_is_not_the_providers(model):
    broken = failure("RuntimeException", "Exception during initialization: transformer_memcpy.cc:253", NOT_FOUND)
    found = child.failed(broken, CUDA, one_node=True, legal=lambda: False)
    assert found.outcome == "left" and found.said.startswith("CUDA kernel not found")
    whole = child.failed(broken, CUDA, one_node=False, legal=lambda: False)
    assert whole.outcome == "failed", "in a graph the line may be about another node"


def test_a_finding_names_no_temporary_file():
    text = "Load model from /tmp/partita-k9/partita-sr/11.onnx failed:Node (probe) Op (X) [TypeInferenceError] Input 4"
    assert child.failed(failure("Fail", text), CUDA, one_node=True, legal=lambda: False) == child.Found(
        "invalid",
        "Node (probe) Op (X) [TypeInferenceError] Input 4",
    )


def test_an_experiment_that_goes_wrong_by_itself_counts_for_nothing(tmp_path, monkeypatch, model):
    import io
    import json

    def broken(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr(child, "wanted_provider", lambda _: CUDA)
    monkeypatch.setattr(child, "_try_model", broken)
    monkeypatch.setattr(child, "set_alarm", lambda _: None)
    out = io.StringIO()
    request = {"start_seconds": 1, "model_seconds": 1, "models": ["0.onnx"], "folder": str(tmp_path), "one_node": True}
    child.experiment({**request, "provider": {}}, out, None)
    last = json.loads(out.getvalue().splitlines()[-1])
    assert last["outcome"] == "invalid" and "MemoryError: no memory" in last["said"]


def test_a_complaint_of_the_provider_that_reads_like_a_bad_model_is_the_providers():
    broken = failure("InvalidArgument", "activation LeakyRelu is not supported")
    assert child.failed(broken, CUDA, one_node=True, legal=lambda: True).outcome == "failed"
    assert child.failed(broken, CUDA, one_node=True, legal=lambda: False).outcome == "invalid"


class Opened:
    """A session as far as it is looked at."""

    def __init__(self, listed, planned):
        self.plan = (tuple(planned),)
        self.listed = tuple(AssignedNode(name, "X", "", "P", number) for number, name in enumerate(listed))

    def assigned(self):
        return self.listed


@pytest.mark.parametrize(
    ("listed", "planned", "compiles", "expected"),
    [
        (["probe"], ["probe"], False, False),
        ([], ["probe"], False, False),
        ([], ["probe_token_3"], False, False),
        ([], ["Less0", "Where0"], False, True),
        (["", ""], ["Less0", "Where0"], False, True),
        (["probe"], ["P_subgraph_0"], True, False),
        (["_inlfunc_F_n"], ["P_subgraph_0"], True, True),
    ],
)
def test_a_function_that_was_unfolded_is_told_from_a_node(listed, planned, compiles, expected):
    session = cast("Session", Opened(listed, planned))
    assert child.unfolded(session, compiles) is expected
