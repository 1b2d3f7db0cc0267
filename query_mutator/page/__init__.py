"""The page that shows what a run learned: `live` serves it during a run."""

from __future__ import annotations

__all__ = ["live"]
