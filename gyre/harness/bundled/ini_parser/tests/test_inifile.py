import inifile
import pytest
from inifile import INIError, dumps, get, interpolate, load, loads


def test_sections_and_entries():
    assert loads("[a]\nx = 1\ny=2\n[b]\nx: 3\n") == {"a": {"x": "1", "y": "2"}, "b": {"x": "3"}}


def test_nothing():
    assert loads("") == loads("\n\n") == {}


def test_comments():
    assert loads("# one\n; two\n[a]\n  # three\nx = 1\n") == {"a": {"x": "1"}}


def test_no_comment_within_a_line():
    assert loads("[a]\nx = 1 # one\n")["a"]["x"] == "1 # one"


def test_entries_before_any_section():
    assert loads("x = 1\n[a]\n") == {"": {"x": "1"}, "a": {}}


def test_blanks_are_removed():
    assert loads("[  a b ]  \nkey one   =   v w  \n") == {"a b": {"key one": "v w"}}


def test_keys_in_lower_case():
    assert loads("[A]\nKey = V\n") == {"A": {"key": "V"}}


def test_the_first_sign_parts():
    assert loads("[a]\nx = b:c=d\ny: e=f\n")["a"] == {"x": "b:c=d", "y": "e=f"}


def test_a_value_may_be_empty():
    assert loads("[a]\nx =\ny:\n")["a"] == {"x": "", "y": ""}


def test_a_section_that_begins_again():
    assert loads("[a]\nx=1\n[b]\n[a]\ny=2\n") == {"a": {"x": "1", "y": "2"}, "b": {}}


def test_order_is_kept():
    found = loads("[z]\nb=1\na=1\n[y]\n")
    assert list(found) == ["z", "y"]
    assert list(found["z"]) == ["b", "a"]


def test_values_that_go_on():
    assert loads("[a]\nx = 1\n  2\n\t3  \ny = 4\n")["a"] == {"x": "1\n2\n3", "y": "4"}


def test_a_value_goes_on_after_what_is_passed_over():
    assert loads("[a]\nx = 1\n\n# no\n  2\n")["a"]["x"] == "1\n2"


def test_an_empty_value_that_goes_on():
    assert loads("[a]\nx =\n  2\n")["a"]["x"] == "\n2"


def test_quotes():
    assert loads('[a]\nx = "  b  "\ny = ""\n')["a"] == {"x": "  b  ", "y": ""}


def test_escapes():
    assert loads(r"[a]" + "\n" + r'x = "a\nb\tc\"d\\e"')["a"]["x"] == 'a\nb\tc"d\\e'


def test_quotes_within_a_value_are_its_own():
    assert loads('[a]\nx = b "c"\n')["a"]["x"] == 'b "c"'


def test_windows_lines():
    assert loads("[a]\r\nx = 1\r\n") == {"a": {"x": "1"}}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[a]\nword\n", 2),
        ("[a]\n\n[b\n", 3),
        ("[ ]\n", 1),
        ("[a]\n= 1\n", 2),
        ("[a]\nx=1\nX=2\n", 3),
        ('[a]\nx = "b\n', 2),
        ('[a]\nx = "b" c\n', 2),
        ('[a]\nx = "\\q"\n', 2),
        ("  x = 1\n", 1),
    ],
    ids=["word", "open", "no-name", "no-key", "twice", "no-end", "more", "escape", "blank"],
)
def test_errors_name_the_line(text, line):
    with pytest.raises(INIError) as error:
        loads(text)
    assert error.value.line == line


def test_an_error_is_a_value_error():
    assert issubclass(INIError, ValueError)


def test_a_key_twice_in_a_section_that_began_again():
    with pytest.raises(INIError) as error:
        loads("[a]\nx=1\n[b]\n[a]\nx=2\n")
    assert error.value.line == 5


def test_load(tmp_path):
    (tmp_path / "f.ini").write_text("[ä]\nx = ü\n", encoding="utf-8")
    assert load(tmp_path / "f.ini") == load(str(tmp_path / "f.ini")) == {"ä": {"x": "ü"}}


def test_dumps_plain():
    assert dumps({"a": {"x": "1", "y": "2"}, "b": {}}).strip() == "[a]\nx = 1\ny = 2\n\n[b]"


def test_dumps_entries_without_a_section_first():
    assert dumps({"a": {"x": "1"}, "": {"y": "2"}}).strip() == "y = 2\n\n[a]\nx = 1"


@pytest.mark.parametrize(
    "value", ["", " a", "a ", "a\nb", "\t", '"', '"a"', "a\\n", '\n"\\', "# a", "; a", "a = b"]
)
def test_there_and_back(value):
    sections = {"a": {"x": value, "y": "1"}, "b": {"z": value}}
    assert loads(dumps(sections)) == sections


def test_quotes_only_where_they_are_needed():
    assert '"' not in dumps({"a": {"x": "b # c", "y": "d = e", "z": "back\\slash"}})


def test_get():
    sections = {"": {"x": "0"}, "a": {"x": "1"}, "a.b": {"x": "2"}}
    assert [get(sections, key, "no") for key in (".x", "a.x", "a.b.x", "a.y", "c.x")] == [
        "0",
        "1",
        "2",
        "no",
        "no",
    ]


def test_interpolate():
    given = {"": {"home": "/h"}, "a": {"dir": "${home}/a", "file": "${dir}/f"}, "b": {"x": "${a.file}!"}}
    found = interpolate(given)
    assert found["a"] == {"dir": "/h/a", "file": "/h/a/f"}
    assert found["b"]["x"] == "/h/a/f!"
    assert given["a"]["file"] == "${dir}/f"


def test_interpolate_within_the_section_first():
    assert interpolate({"": {"x": "1"}, "a": {"x": "2", "y": "${x}"}})["a"]["y"] == "2"


def test_interpolate_in_the_place_of_the_value():
    assert interpolate({"": {"x": "1", "y": "${x}"}, "a": {"x": "2", "z": "${y}"}})["a"]["z"] == "1"


def test_dollars():
    assert interpolate({"a": {"x": "$$5 $${y}", "y": "$$"}})["a"] == {"x": "$5 ${y}", "y": "$"}


@pytest.mark.parametrize("value", ["${gone}", "${b.x}", "${x}", "${y}"])
def test_what_cannot_be_put_in(value):
    with pytest.raises(INIError) as error:
        interpolate({"a": {"x": value, "y": "${x}"}})
    assert error.value.line is None


def test_it_parses_by_itself():
    import sys

    assert "configparser" not in vars(inifile)
    assert inifile.__name__ in sys.modules
