"""A progress bar with a line of figures, made when it is drawn: tqdm cuts the line to the terminal at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tqdm import tqdm

_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {remaining} left{postfix}"


class FiguresBar(tqdm):  # type: ignore[type-arg]
    """tqdm with `figures`, the most important first; a postfix, as a server that is waited for, takes their place."""

    figures: Callable[[], Sequence[str]] | None = None

    def __str__(self) -> str:
        """Return the line, which tqdm draws."""
        if self.figures is None or not self.total:
            return super().__str__()
        shown = self.postfix or ", ".join(self.figures())
        return self.format_meter(**{**self.format_dict, "bar_format": _FORMAT, "postfix": shown})
