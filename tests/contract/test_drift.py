"""`partita drift` on each provider: a fault in one node of the provider's graph is found in that node."""

from __future__ import annotations

import pytest

from tests.contract.cases import cases
from tests.contract.commands import execute, honoured
from tests.contract.expectations import Environment
from tests.drift.planted import faults


def planted(environment: Environment) -> list[tuple[object, ...]]:
    """A row per fault, in a package all of whose nodes are on the target."""
    return [
        (target, package, fault.name)
        for target in environment.targets
        for package in target.whole
        for fault in faults()
        if fault.graph == package
    ]


@cases("target, package, fault", planted, sample=True, heavy=("qnn",))
@pytest.mark.usefixtures("device")
def test_a_fault_is_found_in_its_node(environment, target, package, fault, packages, tmp_path):
    words = (f"{target.provider},cpu", f"{package}={packages / package}", f"fault={fault}")
    done = honoured(execute("-m", "tests.drift.planted", *words, folder=tmp_path))
    lines = [line.strip() for line in done.out.splitlines()]
    assert any(line.startswith(f"{package}: control within") for line in lines), done
    assert f"{package}.{fault}: layer right, node right" in lines, done
