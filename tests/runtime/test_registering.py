"""What to do about a provider that does not start: nothing that is done already, nothing its form does not take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from partita.providers.resolve import Resolution, known_providers
from partita.providers.start import failure
from partita.runtime import registering
from partita.runtime.registering import registered, unavailable

OPENVINO = known_providers()["openvino"]


@pytest.mark.parametrize(
    ("options", "sets_it"), [({}, False), ({"device_type": "CPU"}, False), ({"device_type": "GPU"}, True)]
)
def test_a_remedy_does_not_set_an_option_as_it_is_set(options: Mapping[str, str], sets_it: bool) -> None:
    """device_type is CPU by default."""
    for reason in ("device_missing", "initialisation_failed"):
        why = failure(OPENVINO, reason, "it says nothing")
        remedy = unavailable(Resolution(OPENVINO, "active", options=options), why).remedy
        assert remedy is not None and (remedy.options[1:] == ("openvino.device_type=CPU",)) is sets_it
        assert "plugin" not in str(remedy), "which the wheel is not"


def test_a_plugin_without_a_device_is_to_be_replaced_by_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin ignores device_type."""
    monkeypatch.setattr(registering, "register_library", lambda name, path: ())
    (found,) = registered([Resolution(OPENVINO, "active", library=Path("libopenvino_plugin.so"))])
    assert found.reason == "device_missing" and found.remedy is not None and not found.remedy.options
    assert found.remedy.command == ("pip", "install", "onnxruntime-openvino")
