"""Directives of the site: the reference, pictures for light and dark mode, and folded tables."""

from __future__ import annotations

import html
import importlib
import inspect
import pathlib
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from docutils.statemachine import StringList
from reference_names import groups, resolve
from sphinx.pycode import ModuleAnalyzer

_LONG = 40  # characters


class PublicNames(Directive):
    """Documents every name of one page of the reference; those in the content come first."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Returns the documentation of the names."""
        names = groups()[self.arguments[0]]
        first = " ".join(self.content).split()
        if unknown := set(first).difference(name.rpartition(".")[2] for name in names):
            raise self.error(f"no such names on this page: {', '.join(sorted(unknown))}")
        order = {name: index for index, name in enumerate(first)}
        names = sorted(names, key=lambda n: order.get(n.rpartition(".")[2], len(order)))
        lines = [line for name in names for line in _documented(name)]
        return _parsed(self, lines)


class NameList(Directive):
    """A list of the names of one page of the reference, with the first sentences of their docs."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the list."""
        lines = []
        for name in groups()[self.arguments[0]]:
            shown = name.removeprefix("jmp_autocast.").removeprefix("integrations.")
            lines += [f"* :py:obj:`{shown} <{name}>`: {_first_sentence(name)}"]
        return _parsed(self, lines)


class Picture(Directive):
    """A picture that a script of docs/figures draws twice: for light and for dark mode."""

    required_arguments = 1
    has_content = True
    option_spec = {"alt": directives.unchanged_required}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        """Returns the figure, with the content as its caption."""
        name = self.arguments[0]
        figure = nodes.figure(classes=["picture"])
        box = nodes.container(classes=["picture-box"])
        for mode in ("light", "dark"):
            uri = directives.uri(f"/figures/{name}-{mode}.svg")
            image = nodes.image(uri=uri, alt=self.options["alt"], classes=[f"only-{mode}"])
            box += image
        figure += box
        if self.content:
            text = nodes.Element()
            self.state.nested_parse(self.content, self.content_offset, text)
            figure += nodes.caption("", "", *text[0].children)
        return [figure]


class FoldTables(Directive):
    """Folds the tables of a page that follow a paragraph which ends with a colon."""

    def run(self) -> list[nodes.Node]:
        """Returns a mark, which `fold_tables` looks for when the page is read."""
        return [_FoldMark()]


class _FoldMark(nodes.Element):
    """Asks for folded tables on its page."""


def fold_tables(app: Any, doctree: nodes.document) -> None:
    """Puts each such table, and those right after it, behind its paragraph as the summary."""
    marks = list(doctree.findall(_FoldMark))
    for mark in marks:
        mark.parent.remove(mark)
    for table in list(doctree.findall(nodes.table)) if marks else []:
        siblings = table.parent.children
        start = siblings.index(table) - 1
        lead = siblings[start] if start >= 0 else None
        if not isinstance(lead, nodes.paragraph) or not lead.astext().endswith(":"):
            continue
        end = start + 1
        while end < len(siblings) and isinstance(siblings[end], nodes.table):
            end += 1
        says = html.escape(lead.astext().removesuffix(":"))
        opening = f'<details class="tables"><summary>{says}</summary>'
        parts = [nodes.raw("", opening, format="html"), *siblings[start + 1 : end]]
        table.parent[start:end] = [*parts, nodes.raw("", "</details>", format="html")]


def widen_columns(app: Any, doctree: nodes.document) -> None:
    """Marks the cells of columns with long texts: on a phone they keep a width to read in."""
    for group in doctree.findall(nodes.tgroup):
        rows = [row.children for row in group.findall(nodes.row)]
        for column in zip(*rows, strict=True):
            if max(len(cell.astext()) for cell in column) > _LONG:
                for cell in column:
                    cell["classes"].append("long")


def _parsed(directive: Directive, lines: list[str]) -> list[nodes.Node]:
    parent = nodes.Element()
    content = StringList(lines, source="the reference")
    directive.state.nested_parse(content, 0, parent)
    return parent.children


def _documented(name: str) -> list[str]:
    value = resolve(name)
    if inspect.isclass(value):
        # `to_json` and the like come from a base class of ours; a tuple's own methods stay out.
        ours = any(base.__module__.startswith("jmp_autocast") for base in value.__mro__[1:])
        inherited = ["   :inherited-members:"] if ours else []
        return ["", f".. autoclass:: {name}", "   :members:", *inherited, ""]
    if callable(value):
        # Overloads would be listed one by one: the signature is that of the function itself.
        signature = inspect.signature(value)
        parameters = [
            p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
        ]
        shown = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
        return ["", f".. autofunction:: {name}{shown}", ""]
    lines = ["", f".. py:data:: {name}", f"   :type: {type(value).__name__}", ""]
    return [*lines, *(f"   {line}" for line in data_comment(name)), ""]


def data_comment(name: str) -> list[str]:
    """Returns the docstring of a constant, from the module of the package that assigns it."""
    package, _, constant = name.rpartition(".")
    value = resolve(name)
    source = importlib.import_module(type(value).__module__.rpartition(".")[0])
    for module in (package, *_modules(source)):
        docs = ModuleAnalyzer.for_module(module).find_attr_docs()
        if ("", constant) in docs:
            return docs["", constant]
    raise LookupError(f"{name} has no docstring")


def _modules(package: Any) -> list[str]:
    folder = pathlib.Path(package.__file__).parent
    return [f"{package.__name__}.{path.stem}" for path in sorted(folder.glob("[a-z]*.py"))]


def _first_sentence(name: str) -> str:
    value = resolve(name)
    text = (inspect.getdoc(value) if callable(value) else "\n".join(data_comment(name))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0]


def skip_named_tuple_fields(app: Any, what: str, name: str, value: Any, skip: bool, *_: Any) -> Any:
    """Leaves out what a ``NamedTuple`` says of its fields, "Alias for field number 0"."""
    return True if type(value).__name__ == "_tuplegetter" else None


def add_types(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Puts types beside the arguments and the result, as the author of the code wrote them."""
    function = getattr(value, "fget", None) or getattr(value, "func", value)
    annotations = getattr(inspect.unwrap(function), "__annotations__", {})
    written = {n: t for n, t in annotations.items() if isinstance(t, str)}
    for index in reversed(range(len(lines))):
        if (found := re.match(r"\s*:param (\w+):", lines[index])) and found[1] in written:
            lines.insert(index, f":type {found[1]}: {written[found[1]]}")
    result = written.get("return", "None")
    if what in ("function", "method", "property") and result not in ("None", "Any"):
        ends = [i for i, line in enumerate(lines) if line.startswith((":raises", ".. rubric"))]
        at = min(ends, default=len(lines))
        lines[at:at] = [f":rtype: {result}", ""]


def register(app: Any) -> None:
    """Registers the directives."""
    app.add_directive("public-names", PublicNames)
    app.add_directive("name-list", NameList)
    app.add_directive("fold-tables", FoldTables)
    app.add_directive("picture", Picture)
    app.connect("doctree-read", fold_tables)
    app.connect("doctree-read", widen_columns)
    app.connect("autodoc-skip-member", skip_named_tuple_fields)
    app.connect("autodoc-process-docstring", add_types, priority=900)  # after napoleon
