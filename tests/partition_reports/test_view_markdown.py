"""Markdown view: same content as the other views; model names are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from partita.partition_reports.render.markdown import safe
from partita.partition_reports.sections.model import Command
from partita.partition_reports.sections.report import document
from tests.partition_reports import pages
from tests.partition_reports.reports import REPORTS, recorded
from tests.partition_reports.samples import shown

OURS = {"<details><summary>", "</summary>", "</details>", "<br>", "<code>", "</code>", "<sub>", "</sub>"}
LARGEST_COMMENT = 65_536
"""Characters that GitHub takes."""
HOSTILE = (
    "</details></table><script>alert(1)</script>|x|`code`*bold*[a](http://evil.example)@owner ![i](//e.x/i.png) "
    "&lt; www.evil.example # + - ```\n\n# heading\n\x1b[31m\u202e"
)


def tokens(text: str) -> Iterator[Token]:
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text):
        yield token
        yield from token.children or ()


@pytest.mark.parametrize("name", REPORTS)
def test_tables_are_well_formed_and_comment_is_below_limit(name: str) -> None:
    text = shown(REPORTS[name](), "markdown")
    assert len(text) < LARGEST_COMMENT
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = block.splitlines()
        assert len({row.count("|") for row in rows}) == 1, rows[:3]
        assert re.fullmatch(r"\|(?: (?::---|---:) \|)+", rows[1])
    tables = sum(token.type == "table_open" for token in tokens(text.replace("<details>", "\n<details>")))
    assert tables >= (3 if REPORTS[name]().phases else 1)


def test_headline_comes_first_and_details_are_collapsed() -> None:
    report = recorded("webgpu")
    text, found = shown(report, "markdown"), document(report)
    assert text.startswith(f"### {found.sign} {found.headline[0]}\n\n**fallbacks**: ")
    command = next(block for block in found.opening if isinstance(block, Command))
    assert f"```sh\n{command.text}\n```" in text
    assert text.count("<details>") == text.count("</details>") > 5
    assert text.index("#### Fallbacks") < text.index("<details>")
    for provider in report.phases[1].providers:
        assert f"nodes on {provider.provider.removesuffix('ExecutionProvider')}" in text


@pytest.mark.parametrize("text", [HOSTILE, pages.HOSTILE, pages.CONTROL])
def test_hostile_names_produce_no_markup(text: str) -> None:
    written = shown(pages.hostile_report(text), "markdown")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u2028\u202e\u2066]", written)
    outside = re.sub(r"```sh\n.*\n```", "", written)
    assert set(re.findall(r"<[^>]*>", outside)) <= {part for tag in OURS for part in re.findall(r"<[^>]*>", tag)}
    assert "@" not in outside and "://" not in outside
    found = list(tokens(outside.replace("<details>", "\n<details>")))
    assert not [token for token in found if token.type in ("link_open", "image", "code_inline", "em_open", "s_open")]
    assert sum(token.type == "heading_open" for token in found) == 3, "the headline and two open sections"


@pytest.mark.parametrize("name", ["/model/__init__/MatMul", "a_b", "_a_", "__a__b__"])
def test_underscores_produce_no_emphasis(name: str) -> None:
    (block,) = [each for each in MarkdownIt("commonmark").parse(safe(name)) if each.type == "inline"]
    found = block.children or []
    assert {child.type for child in found} <= {"text", "text_special"}
    assert "".join(child.content for child in found) == name


MENTION = re.compile(r"(?:^|\W)@[a-z\d]|#\d|\bgh-\d", re.IGNORECASE)
"""What GitHub makes a mention or a link to an issue of, in the text of the rendered page outside of code."""


@pytest.mark.parametrize("name", ["n5/@torvalds please", "@a", "octocat/repo#5", "#1", "GH-7", "@org/team", "(@x)"])
def test_names_create_no_mentions_or_issue_links(name: str) -> None:
    assert MENTION.search(name)
    for text in (safe(name), f"| {safe(name)} | b |", f"### {safe(name)}"):
        html = MarkdownIt("commonmark").enable("table").render(text)
        plain = unescape(re.sub(r"<[^>]*>", "", html))
        assert not MENTION.search(plain) and name in plain.replace("\u200b", "")
