"""Configuration of the documentation site: `python -m sphinx -W -b html docs docs/_build/html`.

Nothing is fetched, neither at the build nor by the pages: no web fonts, no MathJax, no inventories
of other projects.
"""

from __future__ import annotations

import pathlib
import sys

DOCS = pathlib.Path(__file__).parent
sys.path[:0] = [str(DOCS / "tools"), str(DOCS), str(DOCS.parent)]

import directives  # noqa: E402
import figures.draw  # noqa: E402

import jmp_autocast  # noqa: E402

project = "jmp_autocast"
author = "the authors of jmp_autocast"
copyright = "the authors of jmp_autocast. Apache License 2.0"
version = release = jmp_autocast.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
default_role = "py:obj"  # in docstrings: `Policy`
highlight_language = "python"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# Signatures without types: `directives.add_types` puts them beside the arguments.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"jmp_autocast {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_search_summary = False  # it fetches pages, which browsers refuse for file://
html_use_index = True
pygments_style = "default"
pygments_dark_style = "github-dark"
html_theme_options = {"navigation_with_keys": False}


def setup(app):
    """Registers the directives of this site, and draws its pictures before pages are read."""
    directives.register(app)
    app.connect("builder-inited", lambda app: figures.draw.write_all())
