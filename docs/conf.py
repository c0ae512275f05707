"""Sphinx configuration: ``make docs`` builds docs/ into site/, warnings being errors, with no network."""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

project = "slurm-ppo"
extensions = ["myst_parser"]
exclude_patterns = ["generate", "**/__pycache__"]
html_theme = "furo"
html_title = "slurm-ppo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
myst_heading_anchors = 3


class InlineDrawings(SphinxPostTransform):
    """Put SVG drawings into the page itself, so that they follow its light and dark colours."""

    default_priority = 10
    formats = ("html",)

    def run(self, **options: object) -> None:
        for image in list(self.document.findall(nodes.image)):
            if image["uri"].endswith(".svg"):
                drawing = (Path(self.app.srcdir) / image["uri"]).read_text()
                html = f'<div class="drawing">{drawing}</div>'
                image.replace_self(nodes.raw("", html, format="html"))


def setup(app: Sphinx) -> None:
    app.add_post_transform(InlineDrawings)
