"""`--provider-option NAME.key=value`: taken, or refused before anything is loaded."""

from __future__ import annotations

import pytest

from tests.contract.cases import cases, each_environment
from tests.contract.commands import generated, refused

PACKAGE = "llama-gqa-fp32"


def with_option(environment):
    return [(target,) for target in environment.targets if target.option[0]]


@cases("target", with_option)
@pytest.mark.parametrize(("name", "value"), [("", "purple"), ("no_such_option", "1")])
def test_an_unknown_option_and_a_value_of_another_type_are_usage_errors(
    environment, target, name, value, packages, partita
):
    option = f"{target.provider}.{name or target.option[0]}={value}"
    done = generated(partita, packages / PACKAGE, f"{target.provider},cpu", "--provider-option", option)
    refused(done, name or value, target.option[0], code=2)


@each_environment(sample=True)
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("cpu.use_arena", ["--provider-option"]),
        ("elsewhere.use_arena=1", ["--provider-option"]),
        ("cpu.anything=0", ["has no option 'anything'", "attention", "huge_pages", "spinning"]),
    ],
)
def test_an_option_that_cannot_be_read_is_a_usage_error(environment, option, words, packages, partita):
    refused(generated(partita, packages / PACKAGE, "cpu", "--provider-option", option), *words, code=2)


@each_environment(sample=True)
def test_an_unknown_provider_is_a_usage_error(environment, packages, partita):
    refused(generated(partita, packages / PACKAGE, "nosuchprovider,cpu"), "nosuchprovider", "cpu", code=2)
