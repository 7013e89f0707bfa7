"""A printed table: aligned, with a format or a function a column."""

import pytest

from dlojz_tp import measure, report


def test_numbers_are_aligned_at_the_right_and_what_is_missing_is_a_dash(capsys):
    columns = {"link": "{}", "GB/s": "{:.1f}", "all-reduce": measure.human_seconds}
    report.table(columns, [("Ethernet", 1.25, 0.08), ("NVLink", 300, None)])
    assert capsys.readouterr().out == (
        "link       GB/s  all-reduce\nEthernet    1.2     80.0 ms\nNVLink    300.0           —\n"
    )


def test_a_table_without_rows_is_its_heads(capsys):
    report.table({"a": "{}", "b": "{}"}, [])
    assert capsys.readouterr().out == "a  b\n"


def test_a_row_with_a_value_too_few_is_refused():
    with pytest.raises(ValueError):
        report.table({"a": "{}", "b": "{}"}, [("one",)])
