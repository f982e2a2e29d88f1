"""What the shell offers for a value of an option that is being typed.

Loads no ONNX Runtime and no torch: the answer has to come while a key is pressed. Every function takes what has been
typed of the value and returns what it could become.
"""

from __future__ import annotations

from collections.abc import Iterable

from partita.dtypes import CACHE_PRECISIONS, PRECISIONS, multiplied_with
from partita.export.attention import names


def chains(typed: str) -> list[str]:
    """Provider chains: what stands before the last comma, and a provider that is not in it yet."""
    from partita.providers.resolve import known_providers

    before, comma, begun = typed.rpartition(",")
    taken = before.split(",") if comma else []
    return [before + comma + name for name in _beginning(begun, known_providers()) if name not in taken]


def providers(typed: str) -> list[str]:
    """Provider names where one is expected, not a chain."""
    from partita.providers.resolve import known_providers

    return _beginning(typed, known_providers())


def pins(typed: str) -> list[str]:
    """The provider of a pin; its modules are known only to the model."""
    return [] if ":" in typed else [f"{name}:" for name in providers(typed)]


def provider_options(typed: str) -> list[tuple[str, str]]:
    """PROVIDER.NAME=VALUE: names with what they mean, and the values of those that have few."""
    from partita.providers.resolve import known_providers

    name, equals, _ = typed.partition("=")
    every = {
        f"{provider.name}.{option.name}": option
        for provider in known_providers().values()
        for option in provider.options
    }
    if not equals:
        return [(f"{key}=", option.meaning) for key, option in every.items() if key.startswith(typed)]
    option = every.get(name)
    choices = () if option is None else option.choices or (option.off_on if option.kind == "bool" else ())
    return [(value, "") for value in _beginning(typed, (f"{name}={choice}" for choice in choices))]


def devices(typed: str) -> list[tuple[str, str]]:
    """GPUs that a dry run can simulate."""
    from partita.providers.cuda_dry_run.devices import DEVICES

    return [(device.key, device.name) for device in DEVICES if device.key.startswith(typed)]


def precisions(typed: str) -> list[str]:
    """Values of `--precision`."""
    return _beginning(typed, ("auto", *PRECISIONS))


def activations(typed: str) -> list[str]:
    """Values of `--activations`."""
    return _beginning(typed, dict.fromkeys(name for each in PRECISIONS.values() for name in multiplied_with(each)))


def cache_precisions(typed: str) -> list[str]:
    """Values of `--cache-precision`."""
    return _beginning(typed, CACHE_PRECISIONS)


def caches(typed: str) -> list[str]:
    """Values of `--cache`."""
    return _beginning(typed, ("fixed", "window", "growing"))


def prefill_precisions(typed: str) -> list[str]:
    """Values of `--prefill-precision`."""
    return _beginning(typed, ("int8",))


def attentions(typed: str) -> list[str]:
    """Values of `--attention`: auto and every lowering."""
    return _beginning(typed, ("auto", *names()))


def exporters(typed: str) -> list[str]:
    """Values of `--exporter`."""
    from partita.export.exporters import names as exporter_names

    return _beginning(typed, exporter_names())


def quantisers(typed: str) -> list[str]:
    """Values of `--quantiser`."""
    from partita.export.quantisers import names as quantiser_names

    return _beginning(typed, quantiser_names())


def samplings(typed: str) -> list[str]:
    """Values of `--sampling`."""
    return _beginning(typed, ("checkpoint",))


def speculations(typed: str) -> list[str]:
    """Values of `--speculate`."""
    return _beginning(typed, ("ngram",))


def _beginning(typed: str, names: Iterable[str]) -> list[str]:
    """The names that begin as typed."""
    return [name for name in names if name.startswith(typed)]
