"""The metrics pages of several workers as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

Combine = Callable[[Iterable[float]], float]

# name and labels, value, exemplar
_SAMPLE = re.compile(r'([\w:]+(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?) (\S+)( #.*)?')
_EOF = "# EOF"


def merge_pages(pages: Sequence[str], gauges: Mapping[str, Combine]) -> str:
    """One page in the format of `pages`: counters and histograms are summed, gauges as `gauges` says by name.

    Of several exemplars of a series, the first stays.
    """
    heads: dict[str, list[str]] = {}
    series: dict[str, dict[str, tuple[list[float], str]]] = {}
    for page in pages:
        family = ""
        for line in page.split("\n"):  # a label's value may hold other ends of lines
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
            if line.startswith("#"):
                lines = heads.setdefault(family, []) if line != _EOF else []
                lines += [line] if line not in lines else []
                continue
            found = _SAMPLE.fullmatch(line)
            if found is not None:
                values, _ = series.setdefault(family, {}).setdefault(found[1], ([], found[3] or ""))
                values.append(float(found[2]))
    merged = list[str]()
    for family, lines in heads.items():
        combine = gauges.get(family, sum)
        merged += lines
        for name, (values, exemplar) in series.get(family, {}).items():
            merged.append(f"{name} {float(combine(values))}{exemplar}")
    merged += [_EOF] if any(page.rstrip().endswith(_EOF) for page in pages) else []
    return "\n".join((*merged, ""))
