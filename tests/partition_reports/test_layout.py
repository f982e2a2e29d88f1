"""Lines at any width: no number is cut or broken, nothing is left out, no line is too wide."""

from __future__ import annotations

from collections import Counter

import pytest
from rich.cells import cell_len

from partita.partition_reports.render.layout import NUMBERS, fold, pairs, paragraph, table
from partita.partition_reports.sections.model import Column

WIDTHS = range(20, 201)
COLUMNS = (
    Column("operator", number=False),
    Column("nodes"),
    Column("on", number=False),
    *(Column(title, group=phase) for phase in ("prefill", "decode") for title in (f"{phase} ms", "share")),
    Column("bytes copied"),
    Column("tensor", number=False),
)
ROWS = (
    (
        "MemcpyToHost",
        "18",
        "WebGpu 18",
        "767",
        "29.3 %",
        "812",
        "99.1 %",
        "27.1 KiB or more",
        "model.layers.11.self_attn/Add_1_output_0",
    ),
    (
        "GroupQueryAttention",
        "1,024",
        "WebGpu 1,000, CPU 24",
        "2,619.75",
        "100.0 %",
        "0.013",
        "0.0 %",
        "-",
        "漢字漢字漢字漢字漢字 é" + "x" * 120,
    ),
)


def numbers(text: str) -> Counter[str]:
    return Counter(found[0] for found in NUMBERS.finditer(text))


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_keeps_every_number_and_word_at_every_width(width: int) -> None:
    lines = [line for _, line in table(COLUMNS, ROWS, width)]
    assert max(map(cell_len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    text = "\n".join(lines)
    missing = numbers("\n".join(cell for row in ROWS for cell in row)) - numbers(text)
    assert not missing
    for title in ("nodes", "prefill ms", "decode ms", "share", "bytes copied"):
        assert all(word in text for word in title.split())
    for row in ROWS:
        for cell in row[1:8]:
            assert all(part in text for part in cell.split()), cell


@pytest.mark.parametrize("width", [40, 60])
def test_a_table_that_is_too_wide_is_several_with_the_names_in_each(width: int) -> None:
    lines = [line for _, line in table(COLUMNS, ROWS, width)]
    heads = [line for line in lines if line.startswith("  operator")]
    assert len(heads) > 1
    assert sum(line.startswith("  MemcpyToHost") for line in lines) == len(heads)
    for head in heads:
        assert ("share" in head) <= (" ms" in head or "prefill" in head or "decode" in head), "a share of what?"


def test_on_the_narrowest_terminal_every_cell_has_its_heading() -> None:
    columns = (Column("provider", number=False), Column("ms", group="prefill"), Column("share", group="prefill"))
    text = "\n".join(line for _, line in table(columns, [("WebGpuExecutionProvider", "1,234,567.5", "29.3 %")], 19))
    assert "prefill ms:" in text and "prefill share:" in text and "1,234,567.5" in text and "29.3 %" in text


def test_a_table_that_fits_is_as_wide_as_its_texts() -> None:
    lines = [line for _, line in table(COLUMNS[:3], [row[:3] for row in ROWS], 80)]
    assert lines == [
        "  operator             nodes  on",
        "  ────────────────────────────────────────────────",
        "  MemcpyToHost            18  WebGpu 18",
        "  GroupQueryAttention  1,024  WebGpu 1,000, CPU 24",
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_paragraphs_and_pairs_keep_every_number_and_word(width: int) -> None:
    text = (
        "cost in decode: 24 copies (18.5 KiB, 7,812.25 ms wait), 0.1 % of the node time at "
        "model.layers.1234.self_attn/TensorScatter_17 (transformers/models/llama/modeling_llama.py:257)"
    )
    for lines in (paragraph(text, width, indent=4), paragraph(text, width, indent=2, hang=4)):
        assert max(map(cell_len, lines)) <= width
        assert squeezed("".join(lines)) == squeezed(text)
        assert numbers("\n".join(lines)) == numbers(text)
    shown = pairs([("machine", text), ("", text)], width)
    assert max(map(cell_len, shown)) <= width
    assert numbers("\n".join(shown)) == numbers(text + text)


def test_a_number_stays_with_its_unit_where_both_fit() -> None:
    assert fold("copied 26.5 KiB per token, 99.1 % of it", 14) == ["copied", "26.5 KiB per", "token, 99.1 %", "of it"]


def test_a_long_name_is_broken_after_a_mark() -> None:
    assert fold("model.layers.10.self_attn/MatMul", 20) == ["model.layers.10.", "self_attn/MatMul"]
    assert fold("WebGpuExecutionProvider", 18) == ["WebGpuExecution", "Provider"]
    assert fold("float32[1,8,1024,512,64,128,2048]", 12) == ["float32", "[1,8,1024,", "512,64,128,", "2048]"]
