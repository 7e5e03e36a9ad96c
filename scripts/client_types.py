"""The types of tools, blocks (also of results) and items, and the fields, that the clients of two APIs know.

scripts/client_types.py [DIRECTORY]...     prints them, of the packages `anthropic` and `openai` found there

`tests/data/client_types.json` holds them, with the packages' versions. A test compares that file with the
tables of what becomes of each (`proxy/request/translate/fates.py`), and with the packages that are installed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

# Package → what is listed → the file that has it, and the name of a union, or of a class for its fields.
_WHERE = {
    "anthropic": {
        "tools": ("types/beta/beta_tool_union_param.py", "BetaToolUnionParam"),
        "blocks": ("types/beta/beta_content_block_param.py", "BetaContentBlockParam"),
        "results": ("types/beta/beta_tool_result_block_param.py", "Content"),
        "fields": ("types/beta/message_create_params.py", "MessageCreateParamsBase"),
    },
    "openai": {
        "tools": ("types/responses/tool_param.py", "ToolParam"),
        "items": ("types/responses/response_input_param.py", "ResponseInputItemParam"),
        "fields": ("types/responses/response_create_params.py", "ResponseCreateParamsBase"),
    },
}
_IMPORT = re.compile(r"^from (\.+)([\w.]+) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)
_TYPE = re.compile(r"^    type: .*?Literal\[([^\]]*)\]", re.MULTILINE)
_FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)


def types_of(package: str, directory: Path) -> dict[str, str | list[str]]:
    """The version and the names of the package `package` whose files are in `directory`."""
    version = re.search(r'__version__ = "(.+?)"', (directory / "_version.py").read_text("utf-8"))
    known: dict[str, str | list[str]] = {"version": version[1] if version is not None else ""}
    for what, (path, name) in _WHERE[package].items():
        file = directory / path
        text = _body(file, name) if what == "fields" else ""
        known[what] = sorted(_FIELD.findall(text)) if text else sorted(_tags(file, name))
    return known


def _tags(file: Path, name: str) -> set[str]:
    """The values of the field `type` of a class, or of all classes of a union."""
    text = file.read_text("utf-8")
    if (body := _body(file, name)) is not None:
        return {tag for found in _TYPE.findall(body) for tag in re.findall(r'"(\w+)"', found)}
    found = re.search(rf"^{name}(?:: TypeAlias)? = (.*?)(?=^\S(?<![\])])|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is not None:
        named = set(re.findall(r"\w+", re.sub(r'"[^"]*"', "", found[1]))) - {name}
        return set().union(*(_tags(file, each) for each in sorted(named)))
    for dots, module, several, one in _IMPORT.findall(text):
        for part in (several or one).split(","):
            original, _, alias = part.strip().partition(" as ")
            if name == (alias or original):
                there = file.parents[len(dots) - 1] / f"{module.replace('.', '/')}.py"
                return _tags(there, original) if there.exists() else set()
    return set()


def _body(file: Path, name: str) -> str | None:
    found = re.search(
        rf"^class {name}\(.*?\):\n(.*?)(?=^\S|\Z)", file.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    return found[1] if found is not None else None


if __name__ == "__main__":
    packages = [Path(each) for each in sys.argv[1:]]
    print(json.dumps({each.name: types_of(each.name, each) for each in packages}, indent=1))
