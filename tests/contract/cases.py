"""How a contract test gets its environments: one case per environment and per whatever else it varies in."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

from tests.contract.expectations import ENVIRONMENTS, Environment, Target

Row = tuple[Any, ...]


def cases(
    names: str, rows: Callable[[Environment], Iterable[Row]], *, sample: bool = False, heavy: Container[str] = ()
) -> pytest.MarkDecorator:
    """Parametrise with `environment` and `names` (comma-separated): a case for each of `rows(environment)`.

    `sample`: of rows that begin with the same target `make test` has the first; the others are heavy, and so is every
    case of the environments in `heavy`. Ids begin with the name of the environment, by which the summary counts. An
    environment without rows has no case.
    """
    parameters = [
        pytest.param(
            environment,
            *row,
            marks=[
                pytest.mark.environment(environment.name),
                *([pytest.mark.heavy] if environment.name in heavy or (sample and again) else []),
            ],
            id="-".join([environment.name, *(label(value) for value in row)]),
        )
        for environment in ENVIRONMENTS.values()
        for row, again in _repeated(list(rows(environment)))
    ]
    return pytest.mark.parametrize(["environment", *names.replace(" ", "").split(",")], parameters)


def _repeated(rows: list[Row]) -> list[tuple[Row, bool]]:
    """Each row, and whether one before it begins with the same."""
    return [(row, any(row[0] is other[0] for other in rows[:number])) for number, row in enumerate(rows)]


def label(value: Any) -> str:
    """What an id shows of a value."""
    if isinstance(value, dict):
        return "-".join(map(str, value))
    return value.provider if isinstance(value, Target) else str(value)


def each_environment(*, sample: bool = False) -> pytest.MarkDecorator:
    """One case per environment. `sample`: what is read before any provider is looked for; in others than the first it
    is heavy.
    """
    return pytest.mark.parametrize(
        "environment",
        [
            pytest.param(
                environment,
                marks=[pytest.mark.environment(environment.name), *([pytest.mark.heavy] if sample and number else [])],
                id=environment.name,
            )
            for number, environment in enumerate(ENVIRONMENTS.values())
        ],
    )


def targets(environment: Environment) -> list[Row]:
    """A row per provider that the environment runs on, besides cpu."""
    return [(target,) for target in environment.targets]


def only_in(*names: str) -> Callable[[Environment], list[Row]]:
    """Rows for these environments, without further values."""
    return lambda environment: [("",)] if environment.name in names else []


def packages_of(field: str) -> Callable[[Environment], list[Row]]:
    """Rows of target and package, for the packages that the target lists in `field`."""
    return lambda environment: [(t, package) for t in environment.targets for package in getattr(t, field)]
