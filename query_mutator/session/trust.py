"""What a saved policy may use by itself: the servers, files and plugins that this user has named.

Whoever made a policy file or a run folder must not choose where a key is sent, which file is read, or which code runs.
A command uses such a setting of the file only if the user named it: with a flag, in the environment, in qm.toml, or in
a run on this machine. Training and `qm plan` add what they used to the user's trusted.jsonl, as a line
`["openai_url", "https://..."]` each; a plugin by the sha256 of its source.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from query_mutator.data import BUNDLED
from query_mutator.data.hub import PREFIX as HUB
from query_mutator.encoder.weights import DEFAULT_ENCODER
from query_mutator.errors import UnnamedError, UsageError
from query_mutator.files import decode, encode
from query_mutator.llm.address import server_url
from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.recorded import BUNDLED_RECORDINGS
from query_mutator.plugins import absolute, source_sha256

logger = logging.getLogger(__name__)

SHOWN_CHARS = 200
Named = tuple[str, str]  # a setting and its value


def trusted_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of what this user named: QUERY_MUTATOR_TRUSTED, else one in the user's configuration folder."""
    if environ.get("QUERY_MUTATOR_TRUSTED"):
        return Path(environ["QUERY_MUTATOR_TRUSTED"]).expanduser()
    try:
        folder = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    except RuntimeError:  # a user without a home
        return Path(os.devnull)
    return folder / "query-mutator" / "trusted.jsonl"


def remember(*used: Mapping[str, Any], plugins: Iterable[str] = ()) -> None:
    """Add the settings that a run used, and the digests of its plugins, to the user's file."""
    named = {one for settings in used for one in _reach(settings)} | {("plugin", one) for one in plugins if one}
    path = trusted_path()
    try:
        if missing := sorted(named - _trusted()):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(b"".join(encode(one) + b"\n" for one in missing))
    except OSError as error:
        logger.warning("%s: cannot be written; name servers and plugins again when you use this run", error)


def check_reach(stored: Mapping[str, Any], *, source: object, named: Mapping[str, Any] | None = None) -> None:
    """Raise an UnnamedError for the first stored setting that reaches beyond this process and that nobody named.

    `named` are settings of this command; `source` is the file that holds the stored ones.
    """
    for name, value in unnamed(stored, named or {}):
        flag, shown = f"--{name.replace('_', '-')}", value[:SHOWN_CHARS]
        raise UnnamedError(
            f"{source} names {shown}, and you have not: give {flag} {shown} to use it, or add the line "
            f"{encode((name, shown)).decode()} to {trusted_path()}"
        )


def unnamed(stored: Mapping[str, Any], named: Mapping[str, Any]) -> list[Named]:
    """Return the stored settings that reach beyond this process, and that neither `named` nor the user's file has."""
    found = dict.fromkeys(_reach(stored))
    known = {*_reach(named), *_trusted()} if found else set()
    return [one for one in found if one not in known]


def check_plugins(recorded: Mapping[str, str], *, source: object, named: Iterable[str] = ()) -> None:
    """Raise an UnnamedError for the first stored plugin that is neither in `named` nor one of a run of this user.

    `recorded` has the sha256 of each; where that is known, the source must still have one that is. Nothing is imported.
    """
    places = set(map(absolute, named))
    trusted = _trusted() if recorded else set()
    for spec, sha256 in recorded.items():
        is_known = ("plugin", sha256) in trusted and ("plugin", source_sha256(spec)) in trusted
        if absolute(spec) not in places and not is_known:
            raise UnnamedError(
                f"{source} names the plugin {spec[:SHOWN_CHARS]}, whose code is new or has changed since your "
                "runs; read it, then give --plugin FILE to run it"
            )


def _trusted() -> set[Named]:
    try:
        lines = trusted_path().read_bytes().splitlines()
    except OSError:
        return set()
    found = set()
    for line in lines:
        try:
            name, value = decode(line)
        except (ValueError, TypeError):  # a line that was cut
            continue
        if isinstance(name, str) and isinstance(value, str):
            found.add((name, value))
    return found


# --- which settings reach out ----------------------------------------------------------------------------------------


def _reach(settings: Mapping[str, Any]) -> Iterator[Named]:
    """Yield the settings that reach beyond this process, one for each of several values."""
    for name, is_harmless in _HARMLESS.items():
        value = settings.get(name)
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if one and not is_harmless(str(one)):
                yield name, _address(str(one)) if name in _ADDRESSES else str(one)


def _address(text: str) -> str:
    """Return an address in its one form; one without a path means `/v1`."""
    try:
        return server_url(text).removesuffix("/v1")
    except UsageError:
        return text


def _in_environment(flag: str, url: str) -> bool:
    """Return whether an address is the own one of a backend with this flag, or in its variable of the environment."""
    known = (one for one in map(BACKENDS.get, BACKENDS) if one.url_flag == flag)
    own = (url for one in known for url in (os.environ.get(one.url_variable, ""), one.default_url))
    return _address(url) in {_address(one) for one in own if one}


def _is_inside(path: str) -> bool:
    """Return whether a path stays in the current folder."""
    return not os.path.isabs(path) and not path.startswith("~") and ".." not in PurePath(path).parts


def _never(value: str) -> bool:
    return False


_ADDRESSES = ("ollama_url", "openai_url", "local_server_url")

#: Each setting that may reach out -> whether a value of it does not.
_HARMLESS: Mapping[str, Callable[[str], bool]] = {
    "ollama_url": partial(_in_environment, "ollama_url"),
    "openai_url": partial(_in_environment, "openai_url"),
    "local_server_url": _never,
    "ray_address": _never,
    "gguf": _never,
    "recording": lambda name: name in BUNDLED_RECORDINGS,
    "encoder": lambda spec: spec in (DEFAULT_ENCODER, "hash") or spec.startswith("ollama:"),
    "judge_model": _never,
    "judge_rubric": lambda text: "\n" in text,  # else a file
    "cache_path": _never,
    "dataset": lambda spec: spec in BUNDLED or (_is_inside(spec) and not spec.startswith(HUB)),
    "save_dir": _is_inside,
}
