"""What is known of the machine that a run happens on."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.runtime.environment import integer_unit


@pytest.mark.parametrize(
    ("flags", "unit"),
    [
        ("flags : fpu avx512_vnni avx512_bf16 amx_tile amx_int8", "amx_int8"),
        ("Features : fp asimd asimddp", "asimddp"),
        ("flags : fpu avx2 amx_bf16", ""),
    ],
)
def test_the_fastest_unit_for_small_integers_is_named(tmp_path: Path, flags: str, unit: str) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nmodel name : A processor\n{flags}\n")
    assert integer_unit(info) == unit


def test_a_system_that_does_not_say_has_no_answer(tmp_path: Path) -> None:
    assert integer_unit(tmp_path / "absent") is None
