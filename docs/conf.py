"""How is the site made of these pages? `make docs` builds it into build/docs; nothing in it comes from elsewhere."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

project = "fairgate"
copyright = "the fairgate authors"
try:
    release = metadata.version("fairgate")
except metadata.PackageNotFoundError:
    release = ""

extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["generate"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = [
    "myst.header",  # a page that begins with a picture, or goes from its title to a third heading, is no fault
    "misc.highlighting_failure",  # an excerpt that shows "..." is no whole program
]

html_theme = "furo"
html_title = f"fairgate {release}".strip()
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "
linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1|10\.)", r"https?://[^/]*\.(internal|example\.com)"]


def setup(app: Any) -> None:
    app.connect("source-read", _only_pages_that_are_there)
    app.connect("build-finished", _with_pictures_of_html)


def _with_pictures_of_html(app: Any, fault: Exception | None) -> None:
    """Sphinx takes along what Markdown shows, but not what HTML in it does, as one picture for each colour scheme."""
    for picture in Path(app.srcdir, "figures").glob("*.png") if fault is None else ():
        folder = Path(app.outdir, "figures")
        folder.mkdir(exist_ok=True)
        shutil.copy(picture, folder)


def _only_pages_that_are_there(app: Any, page: str, source: list[str]) -> None:
    """In the table of contents a pattern that matches nothing is a warning; here it is a page still to come."""
    if page == "index":
        lines = source[0].splitlines(keepends=True)
        source[0] = "".join(
            line for line in lines if not line.endswith("*\n") or any(Path(app.srcdir).glob(line.strip() + ".md"))
        )
