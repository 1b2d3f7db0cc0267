"""How likely one word is a slip of the pen for another: a weighted Damerau-Levenshtein distance."""

from __future__ import annotations

from collections.abc import Iterable

_KEY_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
#: Letters that sound alike: writing one for the other is a likelier slip than any two letters.
_SOUNDS = ("aeiouy", "ckqs", "sz", "dt", "gj", "fv", "mn", "bp", "vw", "cx", "cg")


def _pairs(groups: Iterable[str]) -> frozenset[tuple[str, str]]:
    return frozenset((one, two) for group in groups for one in group for two in group if one != two)


_ALIKE = _pairs(_SOUNDS)
_NEIGHBOURS = _pairs(row[at : at + 2] for row in _KEY_ROWS for at in range(len(row) - 1))


def slip_cost(typed: str, meant: str) -> float:
    """Return the weighted Damerau-Levenshtein distance; likely slips cost less than 1 (Damerau 1964)."""
    before, last = list[float](), _edge(meant)
    for i, here in enumerate(typed, start=1):
        row = [last[0] + _insert_cost(typed, i - 1)]
        for j, there in enumerate(meant, start=1):
            best = min(
                last[j - 1] + _swap_cost(here, there, first=i == j == 1),
                last[j] + _insert_cost(typed, i - 1),
                row[j - 1] + _insert_cost(meant, j - 1),
            )
            if i > 1 and j > 1 and here == meant[j - 2] and typed[i - 2] == there and here != there:
                best = min(best, before[j - 2] + (0.7 if i > 2 else 1.1))
            row.append(best)
        before, last = last, row
    # One letter that jumped ("theard") counts as two slips above, but is one.
    jumped = typed[0] == meant[0] and sorted(typed) == sorted(meant)
    return min(last[-1], 1.2) if jumped else last[-1]


def _edge(meant: str) -> list[float]:
    costs = [0.0]
    for at in range(len(meant)):
        costs.append(costs[-1] + _insert_cost(meant, at))
    return costs


def _insert_cost(word: str, at: int) -> float:
    """Return the cost of one letter too many or too few: doubled and silent letters are the usual ones."""
    if word[at] == "'":
        return 0.2
    if (at and word[at] == word[at - 1]) or (at + 1 < len(word) and word[at] == word[at + 1]):
        return 0.4
    if at == 0:
        return 1.4
    if at + 1 == len(word) and (word[at] == "e" or word.endswith("ing")):
        return 0.5
    return 0.75 if word[at] in "aeiouh" else 0.95


def _swap_cost(here: str, there: str, *, first: bool) -> float:
    if here == there:
        return 0.0
    cost = 0.8 if (here, there) in _ALIKE else 0.85 if (here, there) in _NEIGHBOURS else 1.1
    return cost + 0.4 if first else cost
