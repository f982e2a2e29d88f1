"""Provider options from the command line: accepted values and error messages."""

from __future__ import annotations

import pytest

from partita.commands.build import LISTS, split_options
from partita.errors import UsageError
from partita.providers.base import Option, Provider
from partita.providers.options import generic_provider, parse_options, unchecked_notes
from partita.providers.resolve import known_providers, parse_chain, resolve

PROBE = Provider(
    name="probe",
    ort_name="ProbeExecutionProvider",
    aliases=("sonde",),
    options=(
        Option("count", "int", "4", "how many"),
        Option("quick", "bool", "0", "whether to hurry"),
        Option("wordy", "bool", "False", "whether to talk", off_on=("False", "True")),
        Option("level", "choice", "LOW", "how far", ("LOW", "HIGH")),
        Option("folder", "path", "", "where"),
        Option("label", "text", "", "what to call it"),
    ),
)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("probe.count=7", "count", "7"),
        ("probe.count=-1", "count", "-1"),
        (" probe . count = 7 ", "count", "7"),
        ("SONDE.COUNT=7", "count", "7"),
        ("ProbeExecutionProvider.count=7", "count", "7"),
        ("probe.quick=true", "quick", "1"),
        ("probe.wordy=1", "wordy", "True"),
        ("probe.level=high", "level", "HIGH"),
        ("probe.folder=/tmp/a=b", "folder", "/tmp/a=b"),
        ("probe.label=", "label", ""),
    ],
)
def test_option_value_is_converted_to_onnxruntime_spelling(text, name, value):
    assert parse_options(split_options([text]), (PROBE,)) == {"probe": {name: value}}


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["probe.count"], "write PROVIDER.OPTION=VALUE"),
        ([".count=1"], "write PROVIDER.OPTION=VALUE"),
        (["prob.count=1"], "did you mean 'probe'"),
        (["cuda.device_id=1"], "'cuda' is not in the provider chain; the chain is: probe"),
        (["probe.counts=1"], "did you mean 'count'"),
        (["probe.x=1"], r"its options are: count \(int\), quick \(bool\).*level \(LOW\|HIGH\)"),
        (["probe.count=many"], r"count takes an integer \(default 4\): how many"),
        (["probe.count="], "an integer"),
        (["probe.quick=maybe"], "takes 0 or 1"),
        (["probe.level=MIDDLE"], "one of LOW, HIGH"),
        (["probe.folder="], "a path"),
        (["probe.count=1", "sonde.count=2"], "probe.count is given twice"),
        (["probe.count=1", "probe.COUNT=1"], "given twice"),
    ],
)
def test_invalid_option_text_is_a_single_line_usage_error(texts, says):
    with pytest.raises(UsageError, match=says) as caught:
        parse_options(split_options(texts), (PROBE,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["no-separator", "=/tmp/x.so"])
def test_library_without_name_is_a_usage_error(text):
    with pytest.raises(UsageError, match="write NAME=PATH"):
        LISTS["libraries"]([text])


def test_cpu_options_are_not_passed_to_onnxruntime():
    found = parse_options(split_options(["cpu.attention=NAIVE", "cpu.spinning=off"]), parse_chain("cpu"))
    assert found == {"cpu": {"attention": "naive", "spinning": "0"}}
    (resolved,) = resolve(parse_chain("cpu"), ["CPUExecutionProvider"], found)
    assert resolved.options == found["cpu"] and resolved.provider_options == {}


def test_options_of_two_providers_are_separate_and_spelled_for_each():
    texts = ["cuda.use_tf32=off", "openvino.disable_dynamic_shapes=1", "tensorrt.trt_fp16_enable=True"]
    found = parse_options(split_options(texts), parse_chain("tensorrt,cuda,openvino,cpu"))
    assert found == {
        "cuda": {"use_tf32": "0"},
        "openvino": {"disable_dynamic_shapes": "True"},
        "tensorrt": {"trt_fp16_enable": "True"},
    }


def test_unknown_provider_options_pass_with_unchecked_note():
    chain = (generic_provider("XnnpackExecutionProvider"), PROBE)
    found = parse_options(split_options(["xnnpack.intra_op_num_threads=4", "probe.count=1"]), chain)
    assert found["xnnpack"] == {"intra_op_num_threads": "4"}
    (note,) = unchecked_notes(found, chain)
    assert "xnnpack" in note
    assert "unchecked: intra_op_num_threads" in note
    with pytest.raises(UsageError, match="set twice"):
        split_options(["xnnpack.a=4", "xnnpack.a=5"])


@pytest.mark.parametrize("name", sorted(known_providers()))
def test_every_option_accepts_its_default(name):
    provider = known_providers()[name]
    for option in provider.options:
        if option.default:
            found = parse_options(split_options([f"{name}.{option.name}={option.default}"]), (provider,))
            assert found[name][option.name] == option.default, option.name
        assert (option.kind == "choice") == bool(option.choices), option.name
