"""A progress bar whose line always fits the terminal: figures that do not fit are left out, the last ones first.

40%|███████      | 12 min left, valid 63%, return +0.49, 157 calls/s, limit 91%, 0 failed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm
from tqdm.utils import disp_len, disp_trim

_UNITS = ((172_800.0, 86_400.0, "d"), (7200.0, 3600.0, "h"), (120.0, 60.0, "min"))
_SHORTEST, _USUAL, _LONGEST = 4, 10, 40  # columns of the bar itself


class FittingBar(tqdm):  # type: ignore[type-arg]
    """tqdm with a line of figures; without `figures` it is tqdm's own.

    A postfix, as a server that is waited for, takes the place of the figures.
    """

    figures: Callable[[], Sequence[str]] | None = None

    def __str__(self) -> str:
        """Return the line, which tqdm draws."""
        if self.figures is None or not self.total:
            return super().__str__()
        now: Mapping[str, Any] = self.format_dict
        if self.postfix:
            shown = [str(self.postfix)]
        else:
            left = time_left(self.total - self.n, done=self.n - self.initial, elapsed_s=now["elapsed"])
            shown = [*filter(None, [left]), *self.figures()]
        fill = "#" if self.ascii is True else "█"
        columns = None if now["ncols"] is None else now["ncols"] - 1  # some terminals wrap after the last column
        return fitted(shown, name=self.desc, n=self.n, total=int(self.total), columns=columns, fill=fill)


def fitted(figures: Sequence[str], *, name: str, n: float, total: int, columns: int | None, fill: str) -> str:
    """Return the line of a bar in at most `columns`; None for no limit.

    What is kept first: the percentage, then figures in their order, then steps, a bar, and its name.
    """
    share = min(1.0, n / total)
    percent, steps = f"{int(100 * share):3d}%", f"{n:.0f}/{total}"
    room = 10**6 if columns is None else columns - len(percent)
    shown: list[str] = []
    for figure in dict.fromkeys([*figures, steps]):  # figures may have the steps in another place
        if disp_len(figure) + 2 <= room or not shown:  # of the first at least its beginning
            shown.append(figure)
            room -= disp_len(figure) + 2
    name = f"{name.removesuffix(': ')} "
    if room < len(name) + _SHORTEST + 2:
        name = ""
    width = _USUAL if columns is None else min(_LONGEST, room - len(name) - 2)
    bar = f"|{(fill * int(share * width)).ljust(width)}|" if width >= _SHORTEST else ""
    separator = " " if bar else "  "
    line = f"{name}{percent}{bar}{separator}{', '.join(shown)}"
    return line if columns is None else str(disp_trim(line, columns))


def time_left(steps: float, *, done: float, elapsed_s: float) -> str:
    """Return how long `steps` more take at the pace of those done, "" before the first."""
    if done <= 0:
        return ""
    seconds = max(0.0, steps) * elapsed_s / done
    for least, size, unit in _UNITS:
        if seconds >= least:
            return f"{seconds / size:.0f} {unit} left"
    return f"{seconds:.0f} s left"
