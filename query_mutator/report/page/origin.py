"""The section that says how to repeat a run, and the redaction of secrets in all that a page holds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from query_mutator.errors import HIDDEN, hide_credentials

__all__ = ["Redactor", "origin_of"]

_SECRET_NAME = re.compile(r"(key|token|secret|passw(or)?d|credential|auth(orization)?)$", re.IGNORECASE)
_MIN_CHARS = 8  # of a secret: shorter values of such variables are words
_PATTERNS = (
    re.compile(r"(?P<name>--[\w-]*(key|token|secret|password|passwd|credential)[= ]+)(?P<secret>('[^']*'|\S+))", re.I),
    re.compile(
        r"(?P<name>\b((proxy-)?authorization|cookie|[\w-]*(api-key|token|secret))\s*:\s*)"
        r"(?P<secret>((bearer|basic|token)\s+)?[^\s'\",;]+)",
        re.I,
    ),
    re.compile(r"(?P<name>)(?P<secret>\bsk-[\w/+-]{16,})"),
)
_PARTS = ("command_line", "flags", "versions", "hardware", "commit", "dataset_sha256", "started", "resumed")


class Redactor:
    """Replaces secrets in texts: those of the environment and of settings that are named as secrets, wherever they are.

    Credentials in addresses, in headers and after flags that are named as secrets are replaced by their form.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        found = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
        found |= set(_secrets_in(config))
        self._secrets = sorted((value for value in found if len(value) >= _MIN_CHARS), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return a text without the secrets that are known."""
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, HIDDEN)
        return text

    def setting(self, value: Any) -> Any:
        """Return a setting, nested ones included, without secrets and without what looks like one."""
        if isinstance(value, str):
            shown = hide_credentials(self.text(value))
            for pattern in _PATTERNS:
                shown = pattern.sub(lambda match: f"{match['name']}{HIDDEN}", shown)
            return shown
        if isinstance(value, Mapping):
            return {name: HIDDEN if _is_secret(name, item) else self.setting(item) for name, item in value.items()}
        return [self.setting(item) for item in value] if isinstance(value, (list, tuple)) else value


def origin_of(config: Mapping[str, Any], redactor: Redactor) -> dict[str, Any]:
    """Return what it takes to repeat a run."""
    return {name: redactor.setting(config.get(name)) for name in (*_PARTS, "backend", "encoder", "plugins")}


def _is_secret(name: object, value: object) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET_NAME.search(str(name)) is not None


def _secrets_in(value: Any) -> Iterator[str]:
    """Yield the values of settings that are named as secrets."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if _is_secret(name, item):
                yield item
            else:
                yield from _secrets_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets_in(item)
