"""A refusal of a package names the option that is at fault, and a package made with it is not refused."""

from __future__ import annotations

import json

import pytest

from tests.contract.cases import cases
from tests.contract.commands import execute, generated, honoured

OPTIONS = {"--attention": 1, "--precision": 2}
"""Options of export, and which part of a package's name they are."""


def made_by(command: list[str], package: str) -> str:
    """The package of the tests that a command makes in place of another one."""
    parts = package.split("-")
    for option, place in OPTIONS.items():
        if option in command:
            parts[place] = command[command.index(option) + 1]
    return "-".join(parts)


def refusing(environment):
    """Packages that a provider, or an older ONNX Runtime as a whole, does not take all of."""
    found = [(target, name, target.provider) for target in environment.targets for name in target.refused_alone]
    older = environment.name == "openvino"  # ONNX Runtime 1.24 has no operators of opset 24
    return [*found, *((target, "llama-onnx24-fp32", "cpu") for target in environment.targets if older)]


@cases("target, package, provider", refusing)
@pytest.mark.usefixtures("device")
def test_a_lowering_that_is_not_taken_is_to_be_another(
    environment, target, package, provider, packages, partita, tmp_path
):
    done = execute(
        "-m", "tests.remedy_of", "generate", packages / package, "hi", "--provider", provider, folder=tmp_path
    )
    commands = [command for command, _ in json.loads(done.out) if command]
    assert commands and all(command[:2] == ["partita", "export"] for command in commands), done
    made = {made_by(command, package) for command in commands} - {package}  # one that asks the provider names neither
    assert made, done
    for name in made:
        honoured(generated(partita, packages / name, provider))
