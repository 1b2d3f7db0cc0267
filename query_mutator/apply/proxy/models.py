"""Virtual models in the lists and descriptions of Ollama's and OpenAI's APIs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import orjson

from query_mutator.apply.proxy.replies import parsed
from query_mutator.apply.proxy.requests import virtual_name
from query_mutator.types import Json

__all__ = ["LISTS", "add_virtual", "merged_list", "writes_text"]

#: Path of a list of models -> the field that has the rows, the fields of a row that name the model.
LISTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "/api/tags": ("models", ("name", "model")),
    "/api/ps": ("models", ("name", "model")),
    "/v1/models": ("data", ("id",)),
}


def merged_list(path: str, contents: Sequence[bytes]) -> bytes | None:
    """Return the lists of several servers as one, with virtual models; None if none of the contents is a list.

    A model that several servers have is listed once.
    """
    replies = [reply for content in contents if (reply := parsed(content)) is not None]
    if not replies:
        return None
    field, names = LISTS[path]
    rows: dict[str, Json] = {}
    for reply in replies:
        found = reply.get(field)
        for row in found if isinstance(found, list) else ():
            if isinstance(row, dict):
                rows.setdefault(str(row.get(names[0])), row)
    merged = replies[0] if len(replies) == 1 else {**replies[0], field: [*rows.values()]}
    return orjson.dumps(add_virtual(path, merged, writes_text=writes_text))


def add_virtual(path: str, reply: Json, *, writes_text: Callable[[Json], bool]) -> Json:
    """Return a list of models in which each that writes text is followed by its virtual one."""
    field, names = LISTS[path]
    rows = reply.get(field)
    if not isinstance(rows, list):
        return reply
    listed = []
    for row in rows:
        listed.append(row)
        if isinstance(row, dict) and writes_text(row):
            renamed = {name: virtual_name(row[name]) for name in names if isinstance(row.get(name), str)}
            listed.append({**row, **renamed})
    return {**reply, field: listed}


_EMBEDS = re.compile(r"embed|minilm|\bbge\b|\be5\b|rerank|whisper|clip\b", re.IGNORECASE)


def writes_text(row: Json) -> bool:
    """Return whether a listed model writes text: by its capabilities where the list has them, else by its name."""
    capabilities = row.get("capabilities")
    if isinstance(capabilities, list) and capabilities:
        return "completion" in capabilities
    return _EMBEDS.search(str(row.get("name") or row.get("id") or "")) is None
