r"""Letters, digits and marks as llama.cpp knows them: those of Unicode 15.1.

tokenizers and fastokens know those of Unicode 16, and split a text with one of the 4,433 new ones elsewhere.

    old_classes     \p{L} becomes [\p{L}&&[^…]], which tokenizers follows exactly
    plain_classes   and back: fastokens is 20 times as fast with the plain classes, so it gets them, and
    has_new         texts with a new letter go to the slower encoder
"""

from __future__ import annotations

import re

# Ranges may hold what Unicode does not assign: that is no letter anyway.
_NEW = (
    "\u0897\u1c89-\u1c8a\ua7cb-\ua7cd\ua7da-\ua7dc\U000105c0-\U000105f3\U00010d40-\U00010d85"
    "\U00010ec2-\U00010ec4\U00010efc\U00011380-\U000113e2\U000116d0-\U000116e3\U00011bc0-\U00011bf9"
    "\U00011f5a\U00013460-\U000143fa\U00016100-\U00016139\U00016d40-\U00016d79\U00018cff"
    "\U0001ccf0-\U0001ccf9\U0001e5d0-\U0001e5fa"
)
_CLASSES = [(rf"\p{{{kind}}}", rf"[\p{{{kind}}}&&[^{_NEW}]]") for kind in "LNM"]
# In UTF-8, the first bytes of the ranges: far faster to search than the ranges.
_BEGINNINGS = (b"\xe0\xa2", b"\xe1\xb2", b"\xea\x9f")
_FOUR_BYTES = re.compile(rb"\xf0[\x90-\x9c\x9e]")


def old_classes(pattern: str) -> str:
    """The regular expression with the classes of Unicode 15.1."""
    for plain, old in _CLASSES:
        pattern = pattern.replace(plain, old)
    return pattern


def plain_classes(description: str) -> str:
    """A `tokenizer.json` whose expressions have their plain classes again."""
    for plain, old in _CLASSES:
        description = description.replace(old.replace("\\", "\\\\"), plain.replace("\\", "\\\\"))
    return description


def has_new(text: str) -> bool:
    """True if a text has one of the new letters. Of a few other rare letters, too."""
    if text.isascii():
        return False
    raw = text.encode(errors="surrogatepass")
    return any(each in raw for each in _BEGINNINGS) or _FOUR_BYTES.search(raw) is not None
