"""A provider whose native code ended the process over a graph is told from one that does not start."""

from __future__ import annotations

import pytest

from partita.observations.names import EXPERIMENTS, RUN
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.registering import CRASHED, without_crashed

HOW = "native code ended the run with SIGSEGV"


@pytest.mark.parametrize("name", sorted(set(known_providers()) - {"cpu"}))
def test_what_helps_a_provider_to_start_is_not_advised(name: str) -> None:
    """WebGPU's driver was installed, and its user was told to install one."""
    provider = known_providers()[name]
    cpu = Resolution(known_providers()["cpu"], "active")
    found, other = without_crashed([Resolution(provider, "active"), cpu], {name: HOW})
    assert other is cpu and found.status == "unavailable" and found.crashed
    assert found.reason == "initialisation_failed" and found.evidence == HOW
    assert found.remedy == CRASHED != provider.remedy("initialisation_failed")


def test_what_did_not_crash_stays() -> None:
    chain = [Resolution(provider, "active") for provider in known_providers().values()]
    assert without_crashed(chain, {RUN: HOW, EXPERIMENTS: HOW}) == tuple(chain)
