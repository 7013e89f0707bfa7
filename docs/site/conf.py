"""How Sphinx makes the site: `python -m dlojz_tp site` calls it."""

import importlib.util
import shutil
from pathlib import Path

from docutils import nodes

from dlojz_tp.authoring.formulas import mathml

project = "DLO-JZ practical work"
html_title = project
author = copyright = "DLO-JZ"
extensions = ["myst_nb"]
html_theme = "sphinx_book_theme"
html_theme_options = {
    "use_download_button": False,
    "home_page_in_toc": True,
    "navbar_persistent": [],  # one field for searching is enough
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_static_path = ["static"]
html_css_files = ["course.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = html_show_sphinx = False
html_last_updated_fmt = None
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # they would come from a network
myst_enable_extensions = ["dollarmath"]
myst_dmath_double_inline = True
myst_heading_anchors = 4
html_math_renderer = "mathml"
suppress_warnings = ["mystnb.unknown_mime_type"]


def inline(self, node):
    self.body.append(f'<span class="formula">{mathml(node.astext())}</span>')
    raise nodes.SkipNode


def block(self, node):
    self.body.append(f'<div class="formula-block" tabindex="0">{mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def copy_font(app, error):
    """The font of mathematics goes beside the pages."""
    if not error:
        package = importlib.util.find_spec("ziamath").submodule_search_locations[0]
        shutil.copy(Path(package) / "fonts" / "STIXTwoMath-Regular.ttf", Path(app.outdir) / "_static")


def setup(app):
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    app.connect("build-finished", copy_font)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
