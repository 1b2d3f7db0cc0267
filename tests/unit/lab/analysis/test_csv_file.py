"""CSV cells that a spreadsheet would run as formulas."""

from __future__ import annotations

import csv
import io

import pytest

from query_mutator.lab.analysis.csv_file import write_csv


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("-0.5", "-0.5"),
        (-0.5, "-0.5"),
        ("+1e5", "+1e5"),
        ("run-1", "run-1"),
        ("", ""),
    ],
)
def test_a_text_is_never_a_formula_and_a_number_stays_one(value: object, cell: str) -> None:
    out = io.StringIO()
    write_csv(out, [("name", value)])
    assert list(csv.reader(io.StringIO(out.getvalue()))) == [["name", cell]]
