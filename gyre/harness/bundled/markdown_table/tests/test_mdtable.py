import pytest
from mdtable import Table, format_text, from_records, parse, split_row

SIMPLE = "| name | count |\n|:-|-:|\n| a | 1 |\n| longer | 10 |"
LINED_UP = """\
| name   | count |
|:-------|------:|
| a      |     1 |
| longer |    10 |"""


def test_cells():
    assert split_row("| a | b  c |d|") == ["a", "b  c", "d"]


def test_cells_without_outer_bars():
    assert split_row("a | b") == ["a", "b"]
    assert split_row("  | a | b") == ["a", "b"]


def test_empty_cells():
    assert split_row("| | b ||") == ["", "b", ""]


def test_bars_within_cells():
    assert split_row(r"| a \| b | c |") == ["a | b", "c"]


def test_a_bar_at_the_end_that_belongs_to_a_cell():
    assert split_row(r"| a | b\|") == ["a", "b|"]


def test_parse():
    table = parse(SIMPLE)
    assert table.header == ["name", "count"]
    assert table.align == ["left", "right"]
    assert table.rows == [["a", "1"], ["longer", "10"]]


def test_all_alignments():
    assert parse("a|b|c|d\n---|:--|--:|:-:").align == [None, "left", "right", "center"]


def test_rows_that_are_too_short_or_long():
    assert parse("|a|b|\n|-|-|\n|1|\n|1|2|3|").rows == [["1", ""], ["1", "2"]]


def test_a_line_without_a_bar_ends_it():
    assert parse("|a|\n|-|\n|1|\nend\n|2|").rows == [["1"]]


@pytest.mark.parametrize("text", ["|a|\n|b|", "|a|b|\n|-|", "|a|", "|a|\n|:|", "|a|\n|-x|", ""])
def test_what_is_no_table(text):
    with pytest.raises(ValueError):
        parse(text)


def test_render():
    assert parse(SIMPLE).render() == LINED_UP


def test_render_is_at_rest():
    assert parse(LINED_UP).render() == LINED_UP


def test_columns_are_at_least_three_wide():
    assert Table(["a"], [["b"]]).render() == "| a   |\n|-----|\n| b   |"


def test_in_the_middle():
    table = Table(["title"], [["a"], ["ab"], ["abc"]], ["center"])
    assert table.render().splitlines() == ["| title |", "|:-----:|", "|   a   |", "|  ab   |", "|  abc  |"]


def test_other_types():
    assert Table(["n"], [[1], [None], [2.5]]).rows == [["1"], ["None"], ["2.5"]]


def test_bars_and_breaks_are_written_so_that_they_stay():
    table = Table(["a|b"], [["c\nd"]])
    assert table.render() == "| a\\|b |\n|------|\n| c d  |"
    assert parse(table.render()).header == ["a|b"]


def test_no_rows():
    assert Table(["abc", "d"], []).render() == "| abc | d   |\n|-----|-----|"


def test_wide_characters():
    lines = Table(["漢字", "x"], [["abcdef", "y"]]).render().splitlines()
    assert lines == ["| 漢字   | x   |", "|--------|-----|", "| abcdef | y   |"]


def test_combining_characters():
    assert (
        Table(["e\u0301e\u0301e\u0301e\u0301"], [["abcd"]]).render().splitlines()[0]
        == "| e\u0301e\u0301e\u0301e\u0301 |"
    )


def test_text_around_tables():
    text = f"# Title\n\n{SIMPLE}\n\nA | in a line.\n\n{SIMPLE}\n"
    assert format_text(text) == f"# Title\n\n{LINED_UP}\n\nA | in a line.\n\n{LINED_UP}\n"


def test_text_without_a_table_is_as_it_was():
    for text in ("", "a\n", "a | b\nc | d\n", "no end", "a\n\n\n"):
        assert format_text(text) == text


def test_tables_in_code_are_as_they_were():
    text = f"```\n{SIMPLE}\n```\n\n{SIMPLE}"
    assert format_text(text) == f"```\n{SIMPLE}\n```\n\n{LINED_UP}"


def test_code_with_a_language():
    text = f"```md\n{SIMPLE}\n```\n"
    assert format_text(text) == text


def test_records():
    table = from_records([{"a": 1, "b": "x"}, {"b": "y", "c": True}])
    assert (table.header, table.rows) == (["a", "b", "c"], [["1", "x", ""], ["", "y", "True"]])
    assert table.align == ["right", None, None]


def test_records_with_columns():
    table = from_records([{"a": 1, "b": 2.5}], columns=["b", "z"])
    assert (table.header, table.rows, table.align) == (["b", "z"], [["2.5", ""]], ["right", None])


def test_no_records():
    assert from_records([], columns=["a"]).rows == []
