"""The page as text: one file that loads nothing, says what the report says, and stays harmless with any name."""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from partita.cli import run
from partita.partition_reports.reasons.base import load_reasons
from partita.partition_reports.records import DryRunFacts, Report
from partita.partition_reports.verdict import give_verdict
from partita.partition_reports.views import html
from partita.partition_reports.views import json as json_view
from partita.partition_reports.views._page import marks, overview, timeline
from partita.partition_reports.views.base import load_view
from tests.partition_reports import pages
from tests.partition_reports.samples import CPU, GPU, GPU_CHAIN, NO_GPU_CHAIN, mixed_facts, recorded_facts, report_of

VOID = {"meta", "link", "img", "br", "hr", "input", "wbr", "rect", "path"}
LARGEST_PAGE = 2_000_000


@dataclass
class Element:
    """One element with what is in it."""

    tag: str
    attributes: dict[str, str | None]
    parent: Element | None
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> str:
        return self.attributes.get(name) or ""

    @property
    def text(self) -> str:
        """All text in it, in no particular order between children and own text."""
        return " ".join([*self.texts, *(child.text for child in self.children)])

    def all(self, *tags: str) -> list[Element]:
        """Elements below, in the order of the page."""
        found = []
        for child in self.children:
            if not tags or child.tag in tags:
                found.append(child)
            found += child.all(*tags)
        return found

    def one(self, tag: str, **attributes: str) -> Element:
        """The only such element."""
        fitting = [e for e in self.all(tag) if all(e[name.rstrip("_")] == value for name, value in attributes.items())]
        assert len(fitting) == 1, (tag, attributes, len(fitting))
        return fitting[0]


class Reader(HTMLParser):
    """A tree of a page whose elements are all closed; anything else is an error."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self.at = Element("", {}, None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice: {attrs}"
        element = Element(tag, dict(attrs), self.at)
        self.at.children.append(element)
        if tag not in VOID:
            self.at = element

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.at.children.append(Element(tag, dict(attrs), self.at))

    def handle_endtag(self, tag: str) -> None:
        assert self.at.tag == tag, f"</{tag}> closes <{self.at.tag}>"
        assert self.at.parent is not None
        self.at = self.at.parent

    def handle_data(self, data: str) -> None:
        self.at.texts.append(data)


def read(page: str) -> Element:
    """The page as a tree."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.at is reader.root
    return reader.root


def dry_report() -> Report:
    played = DryRunFacts(
        device="h100",
        device_name="NVIDIA H100",
        compute_capability="9.0",
        memory_bytes=80 << 30,
        multiprocessors=132,
        provider_library="libonnxruntime_providers_cuda.so",
        onnxruntime_version="1.31.1",
        cuda_version="13.0",
        stand_ins="ab" * 32,
        not_real=("time",),
        graph_capture=None,
    )
    return pages.mixed_report().model_copy(update={"dry_run": played, "timeline": ()})


REPORTS = {
    "mixed": pages.mixed_report,
    "cpu": pages.cpu_report,
    "deep": lambda: pages.deep_report(layers=3, repeats=1),
    "hostile": pages.hostile_report,
    "control characters": lambda: pages.hostile_report(pages.CONTROL),
    "refused": pages.refused_report,
    "dry": dry_report,
    "unavailable": lambda: report_of(recorded_facts(), NO_GPU_CHAIN),
    "empty": lambda: pages.cpu_report().model_copy(
        update={"phases": (), "cache": None, "totals": None, "timeline": (), "checks": (), "sources": ()}
    ),
}


@pytest.fixture(scope="module", params=REPORTS)
def page(request: pytest.FixtureRequest) -> str:
    return html.to_text(REPORTS[request.param]())


@pytest.fixture(scope="module")
def mixed() -> Element:
    return read(html.to_text(pages.mixed_report()))


@pytest.fixture(scope="module")
def deep() -> Element:
    return read(html.to_text(pages.deep_report(layers=3, repeats=1)))


def section(root: Element, name: str) -> Element:
    return root.one("section", id=name)


def words(element: Element) -> str:
    return " ".join(element.text.split())


# one file, harmless


def test_the_page_loads_nothing_and_runs_only_its_own_script(page: str) -> None:
    root = read(page)
    assert {e["href"][:1] for e in root.all() if "href" in e.attributes} == {"#"}
    for name in ("src", "srcset", "data", "action", "formaction", "poster", "background", "xlink:href", "style"):
        assert not [e.tag for e in root.all() if name in e.attributes]
    assert not root.all("link", "base", "img", "iframe", "object", "embed", "form", "audio", "video", "use", "image")
    assert not [name for e in root.all() for name in e.attributes if name.startswith("on")]
    style, script = (root.one(tag).texts[0] for tag in ("style", "script"))
    assert set(re.findall(r"url\((.)", style)) == {"#"}
    assert "@import" not in style and "http" not in style + script
    assert "innerHTML" not in script and "eval" not in script and "document.write" not in script


def test_the_policy_allows_exactly_this_style_and_script(page: str) -> None:
    root = read(page)
    policy = root.one("meta", **{"http-equiv": "Content-Security-Policy"})["content"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    for tag in ("style", "script"):
        digest = hashlib.sha256(root.one(tag).texts[0].encode()).digest()
        assert rules.pop(f"{tag}-src") == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert not rules
    head = page[: page.index("<style>")]
    assert "Content-Security-Policy" in head, "a policy holds for what comes after it"


def test_hostile_text_stays_text() -> None:
    root = read(html.to_text(pages.hostile_report()))
    assert len(root.all("script")) == len(root.all("style")) == 1
    for name in ("map", "reasons", "nodes", "copies", "sources", "facts", "checks"):
        assert "onerror=window.hacked" in section(root, name).text or name == "map", name
    titles = [e["title"] for e in section(root, "map").all("a") if e["title"]]
    assert titles and all(pages.HOSTILE in title for title in titles if "Memcpy" not in title)
    assert pages.HOSTILE in root.one("title").text and "49" not in root.one("h1").text


def test_control_and_bidirectional_characters_are_gone() -> None:
    page = html.to_text(pages.hostile_report(pages.CONTROL))
    found = {mark for mark in page if unicodedata.category(mark) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")}
    assert found == {"\n"}, found
    assert "a?b?c?d?[31me?f?g?h" in page
    page.encode()


# structure


def test_ids_are_unique_and_every_link_arrives(page: str) -> None:
    root = read(page)
    ids = [e["id"] for e in root.all() if e["id"]]
    assert len(ids) == len(set(ids))
    targets = {e["href"][1:] for e in root.all("a")} | {e["aria-labelledby"] for e in root.all("section")} - {""}
    assert targets <= set(ids), targets - set(ids)


def test_landmarks_and_headings(page: str) -> None:
    root = read(page)
    assert root.one("html")["lang"] == "en" and root.one("title").text.strip()
    body = root.one("body")
    assert [e.tag for e in body.children if e.tag in ("header", "nav", "main", "footer")] == [
        "header",
        "nav",
        "main",
        "footer",
    ]
    assert body.children[0]["href"] == "#main"
    levels = [int(e.tag[1]) for e in root.all("h1", "h2", "h3", "h4")]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert all(e["aria-labelledby"] or e["aria-label"] for e in root.all("section"))


def test_tables_have_captions_and_scopes(page: str) -> None:
    root = read(page)
    for found in root.all("table"):
        assert words(found.one("caption"))
        assert all(e["scope"] in ("row", "col") for e in found.all("th"))
        heads = found.one("thead").all("th")
        for row in found.one("tbody").all("tr"):
            assert len([e for e in row.children if e.tag in ("th", "td")]) == len(heads)
            assert len([e for e in row.children if e["scope"] == "row"]) == 1


def test_pictures_have_words(page: str) -> None:
    root = read(page)
    for picture in root.all("svg"):
        inside = picture.parent
        while inside is not None and inside.tag != "svg":
            inside = inside.parent
        if inside is None:
            assert picture["aria-hidden"] == "true" or (picture["role"] == "img" and picture["aria-label"])
    assert root.one("div", id="detail-body")["aria-live"] == "polite"
    for strip in root.all("div"):
        if strip["class"] == "strip":
            # Thousands of links would bury the sums beside them; the script brings back the one strip that is in use.
            assert strip["aria-hidden"] == "true" and all(e["tabindex"] == "-1" for e in strip.children)


# content


@pytest.mark.parametrize(
    ("report", "state", "headline"),
    [
        (pages.cpu_report, "all", "All of it ran on CPU"),
        (pages.mixed_report, "partly", "Partly on WebGpu: 4 nodes elsewhere"),
        (REPORTS["unavailable"], "none", "Nothing ran on WebGpu"),
        (pages.refused_report, "refused", "WebGpu refused part of the graph; the rest ran there"),
        (REPORTS["empty"], "nothing", "No node is known to have run"),
        (dry_report, "partly", "Partly on WebGpu: 4 nodes elsewhere"),
    ],
)
def test_the_state_comes_first(report, state: str, headline: str) -> None:
    made = report()
    header = read(html.to_text(made)).one("header")
    shown = header.one("p", class_=f"state {state}")
    assert words(shown).replace(overview.SIGNS[overview.find_state(made).name], "").strip() == headline
    assert give_verdict(made) in words(header)


def test_what_no_reader_may_overlook_is_at_the_top() -> None:
    report = dry_report()
    failed = report.checks[0].model_copy(update={"passed": False})
    package = report.package and report.package.model_copy(update={"verification": "unverified"})
    changes = {"checks": (failed,), "exceeded": ("too many copies",), "package": package}
    flags = words(read(html.to_text(report.model_copy(update=changes))).one("ul", class_="flags"))
    for said in ("no NVIDIA H100 was used", "Unverified package", "too many copies", f"failed: {failed.name}"):
        assert said in flags


def test_four_questions_are_answered(mixed: Element) -> None:
    answers = mixed.one("dl", class_="answers")
    said = [words(e) for e in answers.children]
    assert "9 of 13 nodes (69.2 %) on WebGpu in prefill and decode" in said[0]
    assert "4 nodes on CPU in prefill and decode:" in said[1] and "Det 1" in said[1]
    titles = {reason.code: reason.title for reason in load_reasons()}
    assert f"{titles['no_kernel_op']} (no_kernel_op): 1 node, evidence logged" in said[2]
    assert "partitions" in said[3] and "copies per decode run" in said[3] and "host wait" in said[3]


def test_phases_are_in_figures(mixed: Element) -> None:
    figures = section(mixed, "glance").one("table")
    rows = {
        words(row.children[0]): [words(cell) for cell in row.children[1:]] for row in figures.one("tbody").all("tr")
    }
    assert rows["nodes on WebGpu (node time)"] == ["9 (69.2 %)"] * 2
    assert rows["partitions"] == ["5"] * 2
    assert {"tokens per second", "copies between devices, per run", "bytes copied per token"} <= set(rows)
    assert rows["KV cache in place"] == ["no cache"] * 2


def test_the_map_has_every_node_once_per_phase_in_layer_order(deep: Element) -> None:
    table = section(deep, "map").one("table")
    titles = [words(row.children[0]) for row in table.one("tbody").all("tr")]
    assert titles == ["before the layers embed_tokens", "layer 0", "layer 1", "layer 2", "after the layers lm_head"]
    for column in (1, 2):
        cells = [row.children[column] for row in table.one("tbody").all("tr")]
        links = [link["href"] for cell in cells for link in cell.all("a")]
        assert links == [f"#n0-{position}" for position in range(len(pages.layer_nodes(3, 1)))]
    layer = table.one("tbody").all("tr")[1].children[1]
    assert "1 off" in words(layer) and "on CPU: Attention 1" in words(layer)
    signs = [words(link) for link in layer.all("a")]
    assert signs == ["", "", "", "", "", "", "", "", "↑", "C", "↓", "", "", "", "", "", ""]
    assert layer.all("a")[9]["title"].endswith("(Attention) on CPU")


def test_a_node_is_told_by_letter_and_name_too() -> None:
    letters = marks.pick_letters(["CUDAExecutionProvider", CPU, "CoreMLExecutionProvider", GPU, "unknown", "***"])
    assert letters[CPU] == "C" and letters["unknown"] == "?"
    assert len(set(letters.values())) == len(letters)


def test_partitions_say_who_hands_what_to_whom(mixed: Element) -> None:
    said = words(section(mixed, "partitions"))
    report = pages.mixed_report()
    for part in report.phases[1].partitions:
        for tensor in part.boundary:
            if tensor.direction == "out" and tensor.other_side != "session":
                assert tensor.name in said
    assert "0 (WebGpu)" in said and "1 (CPU)" in said


def test_copies_name_tensor_and_cause(mixed: Element) -> None:
    said = words(section(mixed, "copies"))
    for copy in pages.mixed_report().phases[1].copies:
        assert copy.name in said and (copy.tensor or "") in said
        assert all(cause in said for cause in copy.caused_by[:1])


def test_reasons_have_evidence_remedy_cost_and_experiments(deep: Element) -> None:
    reasons = section(deep, "reasons")
    group = reasons.one("article")
    said = words(group)
    assert "3 nodes in prefill and decode, on CPU" in said
    assert "3 not harmless" in said and "export with --precision fp16" in said
    assert len([e for e in group.all("div") if e["class"] == "finding"]) == 1, "evidence that differs in the name only"
    assert "no kernel for (this node) in float32" in said
    assert "2 experiments on" in said and "and 2 nodes like it" in said
    assert "float16 in place of float32" in said and "taken" in said
    assert "modeling.py:12" in said


def test_the_timeline_has_every_event_of_every_run(deep: Element) -> None:
    report = pages.deep_report(layers=3, repeats=1)
    figures = section(deep, "timeline").all("figure")
    assert len(figures) == len(report.timeline)
    for figure, run_ in zip(figures, report.timeline, strict=True):
        found = []
        for element in figure.all("path", "g"):
            boxes = re.findall(r"M(\d+) 0h(\d+)v10h-\2z", element["d"] or element["data-d"])
            found += [(place, int(start), int(host)) for place, (start, host) in
                      zip(positions(element["data-p"]), boxes, strict=True)]  # fmt: skip
        assert sorted(found) == sorted(run_.events)
        assert "Memcpy nodes, wait and copy together" in words(figure)


def positions(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def test_positions_are_written_short() -> None:
    assert timeline.ranges([0, 1, 2, 5, 4, 7, 8]) == "0-2,5,4,7-8"
    assert positions("0-2,5,4,7-8") == [0, 1, 2, 5, 4, 7, 8]


def test_without_a_timeline_the_page_says_why() -> None:
    assert "A dry run has no times" in words(section(read(html.to_text(dry_report())), "timeline"))
    phases = tuple(phase.model_copy(update={"observed_runs": 0}) for phase in pages.cpu_report().phases)
    unseen = pages.cpu_report().model_copy(update={"timeline": (), "phases": phases})
    assert "No run was observed" in words(section(read(html.to_text(unseen)), "timeline"))


def test_nothing_of_the_report_is_left_out(mixed: Element) -> None:
    report = pages.mixed_report()
    whole = words(mixed)
    for text in (
        *(check.name for check in report.checks),
        *(source.limits for source in report.sources),
        *report.notes,
        *(node.name for phase in report.phases for node in phase.nodes),
        *(entry.evidence for entry in report.fallbacks),
        *(entry.why for entry in (fallback.cost for fallback in report.fallbacks) if entry is not None),
        report.environment.cpu,
        report.environment.onnxruntime_build,
        *(phase.timing_note for phase in report.phases),
    ):
        assert " ".join(text.split()) in whole, text


def test_disagreements_are_shown() -> None:
    facts = mixed_facts(plan=(("ghost",),))
    report = report_of(facts, GPU_CHAIN)
    assert report.disagreements
    said = words(section(read(html.to_text(report)), "checks"))
    assert all(entry.detail in said for entry in report.disagreements)


# look


def variables(style: str) -> dict[str, dict[str, str]]:
    """Colours of the light and the dark mode."""
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    modes = {name: dict(re.findall(r"--(\w+): (#\w{6});", text)) for name, text in (("light", light), ("dark", dark))}
    return {"light": modes["light"], "dark": modes["light"] | modes["dark"]}


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_contrast_is_enough(mode: str) -> None:
    colours = variables(html.read_part("page.css"))[mode]
    for text in ("text", "muted", "link", "good", "warn", "bad"):
        for ground in ("page", "panel"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for number in (*range(marks.COLOURS), "u"):
        assert contrast(colours["on"], colours[f"e{number}"]) >= 4.5, f"letter on e{number}"
        for ground in ("page", "panel"):
            assert contrast(colours[f"e{number}"], colours[ground]) >= 3, f"e{number} on {ground}"
    assert contrast(colours["edge"], colours["page"]) >= 3


def test_colours_are_used_by_name_only() -> None:
    style = html.read_part("page.css")
    rules = re.sub(r":root \{.*?\}", "", style, flags=re.DOTALL)
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b(?!-)", re.sub(r"#[a-z][\w-]*", "", rules))


def test_paper_is_light_and_shows_everything() -> None:
    style = html.read_part("page.css")
    assert "@media screen and (prefers-color-scheme: dark)" in style, "paper keeps the light colours"
    printed = style[style.index("@media print") :]
    assert "details::details-content" in printed and "max-height: none" in printed
    assert "prefers-reduced-motion" in style


# size


def test_a_model_of_32_layers_stays_small() -> None:
    report = pages.deep_report()
    assert len(report.phases[0].nodes) > 1500
    assert len(html.to_text(report).encode()) < LARGEST_PAGE


# the verb


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    json_view.write(pages.mixed_report(), path)
    return path


def test_the_page_goes_beside_the_report(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "html", str(stored)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and str(stored.with_suffix(".html")) in captured.err.replace("\n", "")
    assert stored.with_suffix(".html").read_text(encoding="utf-8") == html.to_text(pages.mixed_report())


def test_the_page_goes_where_it_is_told_to(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = stored.with_name("page.html")
    assert run(["report", "html", str(stored), "--out", str(target)]) == 0
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert not stored.with_suffix(".html").exists()
    capsys.readouterr()
    assert run(["report", "html", str(stored), "--out", "-"]) == 0
    assert capsys.readouterr().out == html.to_text(pages.mixed_report())


@pytest.mark.parametrize(("out", "code", "said"), [("run.json", 2, "the report itself"), ("no/x.html", 1, "not exist")])
def test_a_page_that_cannot_be_written_is_one_line(
    stored: Path, capsys: pytest.CaptureFixture[str], out: str, code: int, said: str
) -> None:
    before = stored.read_bytes()
    assert run(["report", "html", str(stored), "--out", str(stored.parent / out)]) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert stored.read_bytes() == before


def test_it_is_a_view() -> None:
    assert load_view("html") is html.VIEW
    assert html.to_text(pages.cpu_report()).endswith("</html>\n")
