"""Long messages of native code lose their middle."""

from __future__ import annotations

import pytest

from partita.observations.native_text import cut


@pytest.mark.parametrize("length", [299, 300, 301, 302, 1000, 20_000])
def test_a_text_is_never_longer_than_asked_and_keeps_both_ends(length: int) -> None:
    text = "first " + "x" * (length - 10) + "last"
    found = cut(text, 300)
    assert len(found) <= 300 and found.startswith("first ") and found.endswith("last")
    assert (found == text) is (length <= 300)
    assert length <= 300 or " … " in found
