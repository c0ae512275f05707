"""Sphinx configuration: ``make docs`` builds docs/ into site/, warnings being errors, with no network."""

from importlib.metadata import version as installed_version
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

project = "slurm-ppo"
release = installed_version("slurm-ppo")
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["generate", "**/__pycache__"]
html_theme = "furo"
html_title = f"slurm-ppo {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
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


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt (llmstxt.org): for language models, every page's title and its source in Markdown."""
    if error is not None or app.builder.name != "html":
        return
    lines = ["# slurm-ppo", "", "> PPO post-training of language models as plain Slurm batch jobs", ""]
    for section in ("", "tutorial", "howto", "explanation", "reference", "contributing"):
        names = [name for name in sorted(app.env.titles) if name.rpartition("/")[0] == section]
        pages = [f"- [{app.env.titles[name].astext()}](_sources/{name}.md.txt)" for name in names]
        lines += [f"## {section or 'start'}", "", *pages, ""]
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines))


def setup(app: Sphinx) -> None:
    app.add_post_transform(InlineDrawings)
    app.connect("build-finished", write_llms_txt)
