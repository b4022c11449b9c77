"""A verdict as JUnit XML: a test case per metric of the gate and per constraint. Pure.

The shape is that of the Jenkins xUnit plug-in's `junit-10.xsd`, which CI systems read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

from tuner.regress.limits import LimitVerdict
from tuner.regress.verdict import MetricVerdict, Word
from tuner.regress.words import describe, describe_limit

_NOT_XML = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Outcome = Literal["passed", "failure", "error", "skipped"]
_OUTCOMES: dict[Word, Outcome] = {
    "ok": "passed",
    "improved": "passed",
    "regressed": "failure",
    "inconclusive": "skipped",
    "not comparable": "error",
}


@dataclass(frozen=True)
class Case:
    """One line of the report."""

    name: str
    outcome: Outcome
    message: str = ""
    detail: str = ""


def verdict_cases(
    metrics: Mapping[str, MetricVerdict], limits: Sequence[LimitVerdict], suspects: Sequence[str]
) -> list[Case]:
    """The cases of a run that has a verdict; metrics outside the gate always pass."""
    blame = "\n".join(f"suspect: {s}" for s in suspects)
    cases = []
    for name, m in metrics.items():
        outcome = _OUTCOMES[m.verdict] if m.gate else "passed"
        cases.append(Case(name, outcome, f"{m.verdict}: {describe(m)}", blame if outcome == "failure" else m.reason))
    for limit in limits:
        detail = blame if limit.verdict == "regressed" else limit.reason
        cases.append(
            Case(limit.constraint, _OUTCOMES[limit.verdict], f"{limit.verdict}: {describe_limit(limit)}", detail)
        )
    return cases


def junit_xml(suite: str, cases: Sequence[Case], *, time_s: float, timestamp: str, output: str = "") -> str:
    """The document; `timestamp` is ISO 8601, `output` what goes to `system-out`."""
    count = {kind: sum(c.outcome == kind for c in cases) for kind in ("failure", "error", "skipped")}
    root = ET.Element("testsuites")
    node = ET.SubElement(
        root,
        "testsuite",
        name=_text(suite),
        tests=str(len(cases)),
        failures=str(count["failure"]),
        errors=str(count["error"]),
        skipped=str(count["skipped"]),
        time=f"{time_s:.3f}",
        timestamp=timestamp[:19],
    )
    for case in cases:
        one = ET.SubElement(node, "testcase", classname="chunktune.regress", name=_text(case.name), time="0.000")
        if case.outcome == "skipped":
            ET.SubElement(one, "skipped", message=_text(case.message)).text = _text(case.detail)
        elif case.outcome != "passed":
            ET.SubElement(one, case.outcome, type=case.outcome, message=_text(case.message)).text = _text(case.detail)
        elif case.message:
            ET.SubElement(one, "system-out").text = _text(case.message)
    if output:
        ET.SubElement(node, "system-out").text = _text(output)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _text(text: str) -> str:
    """XML cannot carry control characters, and logs are full of them."""
    return _NOT_XML.sub("\ufffd", text)
