"""`--provider-option cuda.device_id=1`: texts from the command line, checked against what each provider takes.

Knows the kinds of options and how ONNX Runtime spells their values; what the options are stands in the providers'
files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from partita.errors import UsageError
from partita.providers.base import Option, Provider
from partita.spelling import did_you_mean, nearest, spelled

NO = frozenset({"0", "false", "no", "off"})
YES = frozenset({"1", "true", "yes", "on"})


def parse_options(
    texts: Sequence[str], chain: Sequence[Provider], argument: str = "provider_options"
) -> dict[str, dict[str, str]]:
    """Read `PROVIDER.NAME=VALUE` texts for the providers of the chain: provider name -> option -> value as ONNX Runtime
    takes it.

    Raises UsageError when a text has another form, names a provider outside the chain, an option that the provider does
    not have or a value of the wrong kind, or when an option is given twice.
    """
    by_name = {name.lower(): provider for provider in chain for name in provider.names()}
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        written = spelled(argument, text)
        provider, name, value = _split_option(text, written, by_name, chain)
        given = found.setdefault(provider.name, {})
        option = _find_option(written, provider, name)
        key = option.name if option else name
        if key in given:
            raise UsageError(f"{written}: {provider.name}.{key} is given twice; give it once")
        given[key] = _check_value(written, option, value) if option else value
    return found


def _split_option(
    text: str, written: str, by_name: Mapping[str, Provider], chain: Sequence[Provider]
) -> tuple[Provider, str, str]:
    """Provider, option name and value of one text."""
    left, equals, value = text.partition("=")
    word, dot, name = left.partition(".")
    word, name = word.strip(), name.strip()
    if not equals or not dot or not word or not name:
        raise UsageError(f"{written}: write PROVIDER.OPTION=VALUE, e.g. cuda.device_id=1")
    provider = by_name.get(word.lower())
    if provider is None:
        there = ", ".join(entry.name for entry in chain)
        near = did_you_mean(nearest(word, by_name))
        raise UsageError(f"{written}: {word!r} is not in the provider chain; {near}the chain is: {there}")
    return provider, name, value.strip()


def _find_option(written: str, provider: Provider, name: str) -> Option | None:
    """The option called `name`, in any case; None when the provider's options are not known. Raises UsageError."""
    if provider.any_option:
        return None
    by_name = {option.name.lower(): option for option in provider.options}
    option = by_name.get(name.lower())
    if option is not None:
        return option
    if not by_name:
        raise UsageError(f"{written}: {provider.name} takes no options")
    near = did_you_mean(nearest(name, (option.name for option in provider.options)))
    raise UsageError(f"{written}: {provider.name} has no option {name!r}; {near}it has: {_listed(provider.options)}")


def _listed(options: Iterable[Option]) -> str:
    """Options with their kinds: `device_id (int), use_tf32 (bool)`."""
    return ", ".join(f"{option.name} ({_kind_of(option)})" for option in options)


def _kind_of(option: Option) -> str:
    """Kind of an option for people: `int`, `bool`, `LOW|HIGH`."""
    return "|".join(option.choices) if option.kind == "choice" else option.kind


def _check_value(written: str, option: Option, value: str) -> str:
    """The value as ONNX Runtime takes it. Raises UsageError when it is of the wrong kind."""
    match option.kind:
        case "int":
            try:
                whole = int(value)
            except ValueError as error:
                raise _wrong_value(written, option, "an integer") from error
            if option.least is not None and whole < option.least:
                raise _wrong_value(written, option, f"an integer of at least {option.least}")
            return str(whole)
        case "float":
            try:
                number = float(value)
            except ValueError as error:
                raise _wrong_value(written, option, "a number") from error
            if not math.isfinite(number):
                raise _wrong_value(written, option, "a finite number")
            return repr(number)
        case "bool":
            if value.lower() not in NO | YES:
                raise _wrong_value(written, option, "0 or 1")
            return option.off_on[value.lower() in YES]
        case "choice":
            by_name = {choice.lower(): choice for choice in option.choices}
            if value.lower() not in by_name:
                raise _wrong_value(written, option, f"one of {', '.join(option.choices)}")
            return by_name[value.lower()]
        case "path" if not value:
            raise _wrong_value(written, option, "a path")
        case _:
            return value


def _wrong_value(written: str, option: Option, wanted: str) -> UsageError:
    """The error for a value of the wrong kind."""
    default = f" (default {option.default})" if option.default else ""
    return UsageError(f"{written}: {option.name} takes {wanted}{default}: {option.meaning}")


def unchecked_notes(options: Mapping[str, Mapping[str, str]], chain: Sequence[Provider]) -> tuple[str, ...]:
    """One sentence per provider whose options were passed on without a check."""
    return tuple(
        f"the options of {provider.name} are not known to Partita and are passed on unchecked: "
        f"{', '.join(options[provider.name])}"
        for provider in chain
        if provider.any_option and options.get(provider.name)
    )
