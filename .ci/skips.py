"""python3 .ci/skips.py REPORT.xml...: fails if a test was skipped that should have run.

The reports are JUnit files of ctest and pytest. A machine that lacks gdb must not look like one
where all is well. Instruction sets are no matter: a test goes over those that this processor has
and does not skip for want of others.
"""

from __future__ import annotations

import sys
from xml.etree import ElementTree

ALLOWED = (
    "KESTREL_TEST_MODEL names no checkpoint",  # too large for this repository
    "a small tmpfs cannot be mounted here",  # only root may, and not in every container
)


def why_skipped(case: ElementTree.Element) -> str | None:
    """The reason, or None if the test did run."""
    skipped = case.find("skipped")
    if skipped is not None:
        return skipped.get("message") or "no reason given"
    return "disabled" if case.get("status") == "disabled" else None  # ctest's own word


def main(reports: list[str]) -> int:
    cases = [case for report in reports for case in ElementTree.parse(report).iter("testcase")]
    skips = [(case.get("name"), why) for case in cases if (why := why_skipped(case)) is not None]
    refused = [why for _, why in skips if why not in ALLOWED]
    for name, why in skips:
        print(f"skipped, {'as allowed' if why in ALLOWED else 'NOT ALLOWED'}: {name}: {why}")
    print(f"{len(cases)} tests, {len(skips)} skipped, {len(refused)} of them not allowed")
    return 1 if refused or not cases else 0


sys.exit(main(sys.argv[1:]))
