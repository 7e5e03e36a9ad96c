"""Reads the names of the fields of a multipart form, and which model it names.

Servers read odd forms in different ways. Forms whose fields they could read otherwise than kvpin are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from engine_adapter import ADAPTER_FIELDS, Named
from proxy.errors import BadRequest

FORM_BYTES_PER_MS = 4 << 20
"""Bytes of a form that are read in about 1 ms."""
# The most fields of a form, bytes of a field's headers, and bytes of a model's name.
_MAX_FIELDS, _MAX_HEAD, _MAX_NAME = 1024, 8192, 1024
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"\\]{1,70})"|([^\s";,]{1,70}))\s*(?:;|$)', re.IGNORECASE)
# Names and values in another character set than this one are others to kvpin.
_CHARSET = re.compile(r'charset(?!\s*=\s*"?utf-?8"?\s*(?:;|$))', re.IGNORECASE)
# All names of a field, as servers may read them: the first or the last, encoded or not. Some take these for
# white space, too.
_SPACE = rb"[\s\x1c-\x1f\x85\xa0]*"
_NAMES = re.compile(rb'\bname\*?\d*\*?%b=%b"?([^";\r]*)' % (_SPACE, _SPACE), re.IGNORECASE)
_UNUSUAL = "the body is no multipart form, or an unusual one"
_NEW_LINE, _HEAD_END = b"\r\n", b"\r\n\r\n"
_LAST = (b"--", b"--\r\n", b"--\r\n\r\n")  # Ruby's clients end with an empty line
# Header lines as all servers read them. Some join names in pieces (`name*0`).
_HEAD = re.compile(rb"(?:\r\n[!#-'*+.0-9A-Z^-z|~-]+:[^\0\r\n]*)+")
_IN_PIECES = re.compile(rb"\bname\*\d", re.IGNORECASE)
_MODEL = re.compile(
    rb'\r\ncontent-disposition:[ \t]*form-data;[ \t]*name=(?:"model"|model)[ \t]*(?=\r\n|$)', re.IGNORECASE
)
_DISPOSITION = b"\r\ncontent-disposition:"


@dataclass(frozen=True, slots=True)
class Form:
    """What kvpin needs to know of a form.

    Attributes:
        names: the names of its fields, in every way in which a server may read them.
        model: the first model that it names; None if it names none.
    """

    names: list[str]
    model: Named | None

    def check_one_model(self) -> None:
        """Raises BadRequest if servers may take another model than `model`, or an adapter."""
        found = 0
        for name in self.names:
            read = name.rpartition("'")[2]  # without the character set of an encoded name
            found += read == "model"
            if found > 1 or read in ADAPTER_FIELDS:
                raise BadRequest("with a key for some models, a form names one model, as `model`", param=read)


def read_form(body: bytes, kind: str) -> Form:
    """Reads a form. `kind` is its content type. Raises BadRequest if it is none, or an odd one."""
    found = _BOUNDARY.search(kind)
    if found is None or kind.lower().count("boundary") > 1:
        raise BadRequest("the content type of a form needs one boundary")
    if _CHARSET.search(kind) is not None:
        raise BadRequest("a form is read as UTF-8: its content type must name no other character set")
    mark = b"--" + (found[1] or found[2]).encode("latin-1")
    names, model = list[str](), None
    at = 0 if body.startswith(mark) else -1
    for _ in range(_MAX_FIELDS):
        head_at = at + len(mark)
        if at >= 0 and len(body) - head_at <= len(_LAST[-1]) and body[head_at:] in _LAST:
            return Form(names, model)
        head_end, after = body.find(_HEAD_END, head_at, head_at + _MAX_HEAD), body.find(mark, head_at)
        start, end = head_end + len(_HEAD_END), after - len(_NEW_LINE)
        head = body[head_at:head_end]
        is_field = at >= 0 and head_end >= 0 and start <= end and body.startswith(_NEW_LINE, end)
        if not is_field or _HEAD.fullmatch(head) is None or _IN_PIECES.search(head):
            raise BadRequest(_UNUSUAL)
        given = {each.replace(b"\\", b"").rstrip() for each in _NAMES.findall(head)}
        names += sorted(unquote(each.decode("latin-1")).strip() for each in given)
        if b"model" in given:
            if _MODEL.search(head) is None or head.lower().count(_DISPOSITION) > 1:
                raise BadRequest(_UNUSUAL, param="model")
            model = _model(body[start:end], start) if model is None and start < end else model
        at = after
    raise BadRequest(f"the form has more than {_MAX_FIELDS} fields")


def _model(value: bytes, start: int) -> Named:
    if len(value) > _MAX_NAME:
        raise BadRequest("the form's model is longer than a name", param="model")
    try:
        return Named(value.decode(), start, start + len(value))
    except UnicodeDecodeError as error:
        raise BadRequest("the form's model is not UTF-8", param="model") from error
