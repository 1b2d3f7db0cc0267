"""How the time of reading a reply grows with its length: runs of 40 pieces, for each kind of gold and for refusals.

    python -m benchmarks.reading_time

Prints time(2n) / time(n) of the slowest pieces at n = 10,000 characters; a reader that is linear stays below 2.5.
"""

from __future__ import annotations

import time

from query_mutator.reading import Gold, is_refusal

PIECES = (
    " ", "\n", "\t", "(", "[{", ")", '"', "`", "*", "1", "1,234,", "1 ", "1/", "=", "\n=", "\n- ", "A, ", "a", "a(",
    ".", "_a", "the answer is ", "####", "\\frac{", "\\boxed{", "<think>", "</think>", "?", '{"a":', "sorry ",
    "A or ", "**a** ", "not ", "$", "'a' ", "1:00 ", "and ", "but ", "中,",
)  # fmt: skip
GOLDS = (
    ("5", "How many are 2 and 3?"), ("B", "Which? (A) one (B) two"), ("yes", "Is it?"), ("2020-01-01", "When?"),
    ("10:00", "When?"), ("a, b, c", "Sort: c, a, b"), ("[1, 2]", "What?"), ("C#", "Which?"), ("Ada Lovelace", "Who?"),
)  # fmt: skip


def seconds(text: str) -> float:
    """Return the CPU time that all readers take for a text; no text is read twice."""
    start = time.thread_time()
    for gold, question in GOLDS:
        Gold((gold,), question).matches(text + chr(ord("a") + len(gold)))
    is_refusal(text)
    return time.thread_time() - start


def main() -> None:
    """Print the slowest pieces."""
    rows = []
    for piece in PIECES:
        short, long = (min(seconds((piece * n)[:n] + str(at)) for at in range(3)) for n in (10_000, 20_000))
        rows.append((long / max(short, 0.005), long, piece))
    for ratio, long, piece in sorted(rows, reverse=True)[:10]:
        print(f"{piece!r:>20} time(2n)/time(n) {ratio:.2f}, {1e3 * long:.0f} ms for 20,000 characters")


if __name__ == "__main__":
    main()
