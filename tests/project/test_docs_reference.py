"""Every public name is documented, with an example that runs."""

import doctest
import functools
import importlib.util
import inspect
import re
import sys

import pytest

import jmp_autocast
import jmp_autocast.integrations.nnx
from tests.support.markdown_pages import ROOT


def load(name):
    """A module of docs/tools, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "tools" / f"{name}.py")
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


reference = load("reference_names")
NAMES = sorted(reference.public_names())


def public_objects():
    """(dotted name, object) of each public class, function, and method or property of a class."""
    for name in NAMES:
        value = reference.resolve(name)
        if not callable(value):
            continue  # a constant
        yield name, value
        if not inspect.isclass(value):
            continue
        for attribute, member in vars(value).items():
            function = underlying(member)
            if inspect.isfunction(function) and not attribute.startswith("_"):
                yield f"{name}.{attribute}", function


def underlying(member):
    """The function behind a method, a class method or a property."""
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, functools.cached_property) else member


OBJECTS = dict(public_objects())


def test_the_reference_has_every_public_name():
    names = {f"jmp_autocast.{name}" for name in jmp_autocast.__all__}
    names |= {f"jmp_autocast.inspect.{n}" for n in jmp_autocast.inspect.__all__}
    names -= {f"jmp_autocast.inspect.{n}" for n in jmp_autocast.__all__}
    names.add("jmp_autocast.integrations.nnx.autocast")
    assert names <= set(NAMES)
    assert len(NAMES) == len(set(NAMES)), "each name stands on one page"


@pytest.mark.parametrize("group", reference.groups())
def test_every_group_has_its_page(group):
    text = (ROOT / "docs" / "reference" / f"{group}.md").read_text(encoding="utf-8")
    assert f".. public-names:: {group}\n" in text
    index = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    assert f".. name-list:: {group}\n" in index
    assert f"\n{group}\n" in index


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("name", OBJECTS)
def test_every_public_object_has_an_example_that_runs(name):
    value = OBJECTS[name]
    text = inspect.getdoc(value) or ""
    assert ">>>" in text, f"{name} has no example"
    module = sys.modules[value.__module__]
    example = doctest.DocTestParser().get_doctest(text, dict(vars(module)), name, None, None)
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


PAGE_OF = {
    "autocast": "quick_start.md",
    "Policy": "concepts/policies.md",
    "keep_less": "concepts/residuals.md",
    "dynamic_loss_scaling": "concepts/loss_scaling.md",
}


@pytest.mark.parametrize("name", PAGE_OF)
def test_a_page_has_each_option(name):
    page = (ROOT / "docs" / PAGE_OF[name]).read_text(encoding="utf-8")
    value = getattr(jmp_autocast, name)
    options = set(inspect.signature(value).parameters) - {"fn", "inner"}
    options |= {method for method in vars(value) if method.startswith("with_")}
    assert {option for option in options if not re.search(rf"`{option}\b", page)} == set()
