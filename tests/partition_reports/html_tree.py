"""A page as a tree: every element is closed, no attribute is there twice; anything else is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input", "wbr", "rect", "path"}


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


def section(root: Element, name: str) -> Element:
    return root.one("section", id=name)


def words(element: Element) -> str:
    return " ".join(element.text.split())
