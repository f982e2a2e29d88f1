"""The truth test: on graphs whose cause is known, the reason that is given is that cause, and it is shown.

A case is true by experiment: plain ONNX Runtime leaves the planted node, and takes it in the control, which differs in
the cause alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.conftest import require, require_dry_run
from tests.contract.commands import device_is_there, wrong_processor
from tests.contract.expectations import ENVIRONMENTS
from tests.planted.case import NO_FALLBACK, Case
from tests.planted.cases import CASES, HEAVY, UNSOLVED
from tests.planted.classes import CLASSES, classes_of, table
from tests.planted.judge import Outcome, Verdict, judge, outcomes, plainly

LEAST = 500
LEAST_OF_A_CLASS = 8
MOST_WRONG = 0.03
ENVIRONMENT_NAMES = ("main", "webgpu", "openvino", "qnn", "plugins")


def _marks(case: Case, *, unsolved: bool) -> list[pytest.MarkDecorator]:
    """Its environment, whether others are a sample of it, and whether it is known to be answered wrongly."""
    marks = [pytest.mark.environment(case.environment)]
    marks += [pytest.mark.heavy] if case.name in HEAVY else []
    if unsolved and case.name in UNSOLVED:
        marks.append(pytest.mark.xfail(strict=True, reason=UNSOLVED[case.name]))
    return marks


def planted(cases: tuple[Case, ...], *, unsolved: bool = False) -> pytest.MarkDecorator:
    """A test per case, run by the Python of its environment."""
    return pytest.mark.parametrize(
        "case",
        [pytest.param(case, marks=_marks(case, unsolved=unsolved), id=case.name) for case in cases],
    )


def needed(case: Case) -> None:
    """Skip, or fail in CI, where the machine lacks what the case needs."""
    if case.run.dry_run or (case.control and case.control.dry_run):
        require_dry_run()
    for target in ENVIRONMENTS[case.environment].targets:
        if target.provider == case.provider:
            if why := wrong_processor(target):
                pytest.skip(why)
            if target.needs:
                require(target.needs, device_is_there(target))


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> list[Case]:
    """The cases that this process runs."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    cases = {param["case"].name: param["case"] for param in params if isinstance(param.get("case"), Case)}
    inside = request.config.getoption("--inside")
    return [case for case in cases.values() if ENVIRONMENTS[case.environment].home == inside]


@pytest.fixture(scope="session")
def verdict_of(selected: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Verdict]:
    """What came of a case; all of them are run with the first that is asked for."""
    folder = tmp_path_factory.mktemp("planted")
    ended: dict[str, Outcome] = {}

    def verdict(case: Case) -> Verdict:
        if not ended:
            ended.update(outcomes(selected, folder))
        return judge(case, ended[case.command])

    return verdict


@pytest.fixture(scope="session")
def plain_of(selected: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, bool], str]:
    """Where plain ONNX Runtime has the node of a case, in the planted graph or in the control."""
    folder = tmp_path_factory.mktemp("plain")
    answers: dict[tuple[str, bool], str] = {}

    def plain(case: Case, control: bool) -> str:
        if not answers:
            answers.update(plainly(selected, folder))
        return answers[case.name, control]

    return plain


@planted(CASES, unsolved=True)
def test_the_reason_is_the_cause(case: Case, verdict_of: Callable[[Case], Verdict]):
    needed(case)
    verdict = verdict_of(case)
    assert not verdict.wrong, f"{case.planted}: {verdict.wrong}\n{verdict}"


@planted(tuple(case for case in CASES if case.expected == NO_FALLBACK))
def test_plain_onnxruntime_leaves_no_node(case: Case, plain_of: Callable[[Case, bool], str]):
    needed(case)
    assert plain_of(case, False) == "taken", case.planted


@planted(tuple(case for case in CASES if case.plain and case.expected != NO_FALLBACK))
def test_plain_onnxruntime_leaves_the_planted_node(case: Case, plain_of: Callable[[Case, bool], str]):
    needed(case)
    assert plain_of(case, False) != "taken", case.planted


@planted(tuple(case for case in CASES if case.control))
def test_plain_onnxruntime_takes_it_without_the_cause(case: Case, plain_of: Callable[[Case, bool], str]):
    needed(case)
    assert plain_of(case, True) == "taken", case.planted


def test_there_are_enough_of_every_kind():
    assert len(CASES) >= LEAST
    assert UNSOLVED.keys() <= {case.name for case in CASES}
    assert len(UNSOLVED) / len(CASES) <= MOST_WRONG
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.environment for case in CASES} == set(ENVIRONMENT_NAMES)


def test_every_class_has_cases_and_the_table_counts_a_case_in_each_that_it_bears_on():
    bears_on = {case.name: classes_of(case) for case in CASES}
    count = Counter(number for numbers in bears_on.values() for number in numbers)
    assert all(count[number] >= LEAST_OF_A_CLASS for number in CLASSES), count
    assert bears_on["cuda-pinned"] == (5,) and bears_on["main-cuda-local-function"] == (3, 4)
    header, *rows = table({"cuda-pinned": True, "cuda-pinned-range": False, "cuda-celu": True}, ["main"])
    assert header.split() == ["class", "main", "all"] and len(rows) == len(CLASSES) + 1
    assert [row.split("  ")[-1] for row in rows if row.startswith(("5 pins", "none"))] == ["1 / 2", "1 / 1"]


def test_most_cases_have_a_control():
    caused = [case for case in CASES if case.expected != NO_FALLBACK]
    uncontrolled = [case.name for case in caused if case.control is None]
    assert len(uncontrolled) <= len(caused) // 3, uncontrolled
