"""Reads HTML pages without a browser."""

import html.parser

VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())


class Element:
    """A tag with its attributes; its children are elements and texts."""

    def __init__(self, tag, attributes=()):
        self.tag, self.attributes, self.children = tag, dict(attributes), []

    def all(self, tag=None, **attributes):
        """The elements inside, in the order of the page, that have a tag and attributes."""
        asked = {name.strip("_"): value for name, value in attributes.items()}
        for child in self.children:
            if isinstance(child, Element):
                if tag in (None, child.tag) and asked.items() <= child.attributes.items():
                    yield child
                yield from child.all(tag, **attributes)

    def first(self, tag=None, **attributes):
        return next(self.all(tag, **attributes))

    @property
    def classes(self):
        return (self.attributes.get("class") or "").split()

    @property
    def text(self):
        return "".join(c.text if isinstance(c, Element) else c for c in self.children)


class _Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.path = [Element("")]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, attrs)
        self.path[-1].children.append(element)
        if tag not in VOID:
            self.path.append(element)

    def handle_startendtag(self, tag, attrs):
        self.path[-1].children.append(Element(tag, attrs))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.path[-1].tag == tag, f"</{tag}> closes <{self.path[-1].tag}>"
            self.path.pop()

    def handle_data(self, data):
        self.path[-1].children.append(data)


def read_page(text):
    """The elements of a page; each has to be closed."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.path) == 1, f"<{reader.path[-1].tag}> is not closed"
    return reader.path[0]
