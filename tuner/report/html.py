"""The report as one HTML file that needs nothing else: scripts, styles and data are inside it."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tuner.report.data import ReportData
from tuner.report.page import csv_text, make_page

_ASSETS = Path(__file__).resolve().parent / "assets"


def render(data: ReportData) -> str:
    """The whole page. Text from models, logs and users is escaped; only the two scripts of ours may run.

    About 5 MB, nearly all of it plotly.js: it stays plain so that the file opens everywhere, and web
    servers, mail and version control compress it to 1.5 MB.
    """
    page = make_page(data)
    scripts = [_plotly_script()] if page.drawn else []
    scripts.append((_ASSETS / "report.js").read_text(encoding="utf-8"))
    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["csv"] = csv_text
    environment.filters["unbroken"] = unbroken
    return environment.get_template("report.html.j2").render(
        page=page,
        style=Markup((_ASSETS / "report.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        figure_data=_embedded([f.spec for f in page.drawn]),
    )


def unbroken(text: str) -> str:
    """The text with a number and its unit kept on one line."""
    return re.sub(r"(?<=\d) (?=(?:%|ms|s|min|h|GiB|×)(?:\W|$))", "\u00a0", text)


def _policy(scripts: list[str]) -> str:
    """A Content-Security-Policy: no request to anywhere, no script but these (by hash)."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _embedded(value: object) -> Markup:
    """JSON inside a script element; no byte of it can end the element or be read as markup."""
    text = orjson.dumps(value).decode()
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


@cache
def _plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    # An inline script ends at the first such tag, wherever it stands, strings included.
    return script.replace("</script", "<\\/script")
