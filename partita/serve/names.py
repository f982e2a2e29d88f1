"""Names of the API: those of packages, and of the adapters beside their weights, each of which is a model for clients.

An adapter is called `PACKAGE:ADAPTER` (as SGLang has it), and by its own name alone (as vLLM has it) where nothing else
is called so; under that it is listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.errors import UsageError
from partita.serve.api_errors import ApiError
from partita.serve.fields import shown
from partita.spelling import spelled

MOST_SHOWN = 30
"""Names that a message lists."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a name stands for."""

    package: str
    adapter: str | None = None
    """None: the package as the server was told to run it."""


class Names:
    """Every name that clients may say."""

    def __init__(self, packages: Mapping[str, Sequence[str]]) -> None:
        """`packages`: the adapters of each, by its name. Raises UsageError where two would be called alike."""
        self._packages = {name: tuple(adapters) for name, adapters in packages.items()}
        self._known = {name: Named(name) for name in packages}
        each = [Named(package, adapter) for package, adapters in packages.items() for adapter in adapters]
        for named in each:
            full = f"{named.package}:{named.adapter}"
            if full in self._known:
                raise UsageError(
                    f"two models are called {full}: the adapter {named.adapter} of {named.package}, and another; give "
                    f"the packages other names with {spelled('name')}"
                )
            self._known[full] = named
        own = [named.adapter or "" for named in each]
        self._alone = {name: named for name, named in zip(own, each, strict=True) if own.count(name) == 1}
        self._alone = {name: named for name, named in self._alone.items() if name not in self._known}

    @property
    def listed(self) -> dict[str, Named]:
        """One name of each: of packages, then of their adapters."""
        found = {name: Named(name) for name in self._packages}
        for full, named in self._known.items():
            if named.adapter is not None:
                found[named.adapter if self._alone.get(named.adapter) == named else full] = named
        return found

    def named(self, name: str) -> Named:
        """What a name stands for. Raises ApiError, with the names that there are."""
        found = self._known.get(name) or self._alone.get(name)
        if found is None:
            raise ApiError(404, self._unknown(name), param="model", code="model_not_found")
        return found

    def _unknown(self, name: str) -> str:
        package, _, adapter = name.rpartition(":")
        if package in self._packages and self._packages[package]:
            there = f"{package} has the adapters {_listing(self._packages[package])}"
            return (
                f"The model {shown(name)} does not exist: no adapter of {package} is called {shown(adapter)}; {there}."
            )
        if package in self._packages:
            return f"The model {shown(name)} does not exist: {package} has no adapters beside its weights."
        return f"The model {shown(name)} does not exist; this server has {_listing(list(self.listed))}."


def _listing(names: Sequence[str]) -> str:
    more = len(names) - MOST_SHOWN
    return ", ".join(names[:MOST_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
