"""The documentation as a site, built by scripts/docs. The pages are plain Markdown for git hosts."""

import re
from importlib.metadata import version as version_of
from pathlib import Path
from posixpath import normpath

from sphinx.application import Sphinx

project = "kvpin"
version = release = version_of("kvpin")
extensions = ["myst_parser"]
root_doc = "README"
myst_heading_anchors = 4  # the anchors of git hosts
html_theme = "furo"
html_title = f"kvpin {release}"
html_copy_source = False

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def _read(_app: Sphinx, name: str, source: list[str]) -> None:
    """Turns a page of a git host into a page of the site: the lists of README.md also make the sidebar, and a
    link out of docs/ becomes a path, because the site does not have what it leads to."""
    text = source[0]
    if name == root_doc:
        text += "".join(
            "\n```{toctree}\n:hidden:\n:caption: " + title + "\n\n" + "\n".join(pages) + "\n```\n"
            for title, pages in _sections(text)
        )
    folder = name.rpartition("/")[0]

    def shown(link: re.Match[str]) -> str:
        target = normpath(f"{folder}/{link[2]}".lstrip("/"))
        return f"{link[1]} (`{target.removeprefix('../')}`)" if target.startswith("../") else link[0]

    source[0] = _LINK.sub(shown, text)


def _sections(text: str) -> list[tuple[str, list[str]]]:
    """The titles of README.md, and the pages that each lists."""
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    found = zip(parts[::2], parts[1::2], strict=True)
    lists = [(title, re.findall(r"^- \[[^\]]+\]\(([^)#]+)\)", body, re.MULTILINE)) for title, body in found]
    return [(title, pages) for title, pages in lists if pages]


def _lead_to_the_start(app: Sphinx, error: Exception | None) -> None:
    """Makes index.html, which servers look for."""
    if error is None:
        Path(app.outdir, "index.html").write_text(
            '<meta http-equiv="refresh" content="0; url=README.html">\n'
        )


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("build-finished", _lead_to_the_start)
