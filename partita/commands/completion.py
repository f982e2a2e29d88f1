"""Shell completion of option values.

Loads no ONNX Runtime and no torch: the answer has to come while a key is pressed. Every function takes the typed part
of a value and returns its completions.
"""

from __future__ import annotations


def chains(typed: str) -> list[str]:
    """Provider chains: the text up to the last comma, and a provider that is not in it yet."""
    before, comma, begun = typed.rpartition(",")
    present = before.split(",") if comma else []
    return [before + comma + name for name in providers(begun) if name not in present]


def providers(typed: str) -> list[str]:
    """Names of single providers."""
    from partita.providers.resolve import known_providers

    return [name for name in known_providers() if name.startswith(typed)]


def pins(typed: str) -> list[str]:
    """The provider of a pin; its modules are known only to the model."""
    return [] if ":" in typed else [f"{name}:" for name in providers(typed)]


def provider_options(typed: str) -> list[tuple[str, str]]:
    """PROVIDER.NAME=VALUE: option names with their meaning, and the values of options with a closed set."""
    from partita.providers.resolve import known_providers

    found = []
    for provider in known_providers().values():
        for option in provider.options:
            name = f"{provider.name}.{option.name}="
            choices = option.choices or (option.off_on if option.kind == "bool" else ())
            values = [(f"{name}{choice}", "") for choice in choices] if "=" in typed else [(name, option.meaning)]
            found += [each for each in values if each[0].startswith(typed)]
    return found


def devices(typed: str) -> list[tuple[str, str]]:
    """GPUs that a dry run can simulate."""
    from partita.providers.cuda_dry_run.devices import DEVICES

    return [(device.key, device.name) for device in DEVICES if device.key.startswith(typed)]
