"""What `partita verify` prints: a heading that says what came of it, and a table whose columns stand in line."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from partita.commands.verify import show
from partita.package.records import StepError, Verification

STEPS = ("prefill", "rows of different length", "decode 10", "x")


def printed(status: str, width: int = 80) -> str:
    steps = tuple(
        StepError(step=name, output="logits", max_abs_error=2.098e-05, max_rel_error=1.05e-06, tokens_equal=n != 1)
        for n, name in enumerate(STEPS)
    )
    result = Verification.model_validate(
        {
            "status": status,
            "detail": "…",
            "provider": "WebGpuExecutionProvider",
            "reference": "transformers 5.23.0",
            "tolerance": 1e-4,
            "near_ties": 1,
            "steps": [step.model_dump() for step in steps],
        }
    )
    stream = io.StringIO()
    show(Path("pkg"), result, Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


def test_one_that_fails_is_not_headed_with_the_word_for_one_that_nobody_checked() -> None:
    heading = printed("unverified").splitlines()[0]
    assert heading == "pkg: FAILED: outputs differ from the source model's on WebGpuExecutionProvider"
    assert printed("verified").splitlines()[0] == "pkg: verified on WebGpuExecutionProvider"


def test_columns_stand_in_line_whatever_a_step_is_called() -> None:
    lines = printed("verified").splitlines()
    rows = [next(line for line in lines if line.startswith(f"  {name}  ")) for name in STEPS]
    assert {line.index("logits") for line in rows} == {2 + len("rows of different length") + 2}
    assert len({line.index("1.050e-06") for line in rows}) == 1
    assert [line.split()[-1] for line in rows] == ["equal", "DIFFERENT", "equal", "equal"]
    assert "1 near tie excluded from the token comparison" in " ".join(printed("verified").split())
