"""`--provider-option NAME.key=value`: taken, or refused before anything is loaded."""

from __future__ import annotations

import pytest

from tests.contract.cases import cases, each_environment
from tests.contract.commands import generated, honoured, refused

PACKAGE = "llama-gqa-fp32"


def with_option(environment):
    return [(target,) for target in environment.targets if target.option[0]]


@cases("target", with_option)
@pytest.mark.usefixtures("device")
def test_an_option_is_taken(environment, target, packages, partita, cpu_tokens):
    name, value = target.option
    option = f"{target.provider}.{name}={value}"
    done = honoured(generated(partita, packages / PACKAGE, f"{target.provider},cpu", "--provider-option", option))
    assert done.out == cpu_tokens(PACKAGE)


@cases("target", with_option)
def test_a_value_of_another_type_is_a_usage_error(environment, target, packages, partita):
    option = f"{target.provider}.{target.option[0]}=purple"
    done = generated(partita, packages / PACKAGE, f"{target.provider},cpu", "--provider-option", option)
    refused(done, target.option[0], "purple", code=2)


@cases("target", with_option)
def test_an_unknown_option_is_a_usage_error_that_lists_what_there_is(environment, target, packages, partita):
    option = f"{target.provider}.no_such_option=1"
    done = generated(partita, packages / PACKAGE, f"{target.provider},cpu", "--provider-option", option)
    refused(done, "no_such_option", target.option[0], code=2)


@each_environment(sample=True)
@pytest.mark.parametrize("option", ["cpu.use_arena", "use_arena=1", "=", "", "elsewhere.use_arena=1"])
def test_an_option_that_cannot_be_read_is_a_usage_error(environment, option, packages, partita):
    refused(generated(partita, packages / PACKAGE, "cpu", "--provider-option", option), "--provider-option", code=2)


@each_environment()
def test_an_option_that_the_cpu_provider_has_not_is_refused_with_those_it_has(environment, packages, partita):
    done = generated(partita, packages / PACKAGE, "cpu", "--provider-option", "cpu.anything=0")
    refused(done, "has no option 'anything'", "attention", "huge_pages", "spinning", code=2)
