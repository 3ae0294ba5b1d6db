import random

import pytest
from semver import latest, matches, parse

ORDER = [
    "0.0.1",
    "0.9.0",
    "1.0.0-1",
    "1.0.0-2",
    "1.0.0-11",
    "1.0.0-alpha",
    "1.0.0-alpha.1",
    "1.0.0-alpha.beta",
    "1.0.0-beta",
    "1.0.0-beta.2",
    "1.0.0-beta.11",
    "1.0.0-rc.1",
    "1.0.0",
    "1.0.10",
    "1.2.0",
    "10.0.0",
]


def test_parse():
    version = parse("1.2.3-rc.1+linux.5")
    assert (version.major, version.minor, version.patch) == (1, 2, 3)
    assert (version.prerelease, version.build) == (("rc", "1"), ("linux", "5"))


def test_parse_of_numbers_only():
    version = parse("10.20.30")
    assert (version.prerelease, version.build) == ((), ())


@pytest.mark.parametrize("text", [*ORDER, "1.0.0+001", "1.0.0-0a.--", "1.0.0-x+y-z", "1.0.0--"])
def test_text(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1.2",
        "01.2.3",
        "1.2.3-",
        "1.2.3-01",
        "1.2.3-a..b",
        "1.2.3+",
        "v1.2.3",
        "1.2.3 ",
        "1.2.3.4",
        "1.2.-3",
        "1.2.3-ä",
        "\uff11.2.3",
    ],
)
def test_what_is_no_version(text):
    with pytest.raises(ValueError):
        parse(text)


def test_order():
    shuffled = ORDER.copy()
    random.Random(0).shuffle(shuffled)
    assert sorted(shuffled, key=parse) == ORDER


def test_comparisons():
    a, b = parse("1.0.0-rc.1"), parse("1.0.0")
    assert a < b and a <= b and b > a and b >= a and a != b
    assert a <= parse("1.0.0-rc.1") and a >= parse("1.0.0-rc.1")


def test_the_build_does_not_count():
    a, b = parse("1.0.0+a"), parse("1.0.0+b")
    assert a == b and hash(a) == hash(b) and not a < b


def test_other_types_are_not_equal():
    assert parse("1.0.0") != "1.0.0"


@pytest.mark.parametrize(
    ("text", "part", "next_"),
    [
        ("1.2.3", "major", "2.0.0"),
        ("1.2.3", "minor", "1.3.0"),
        ("1.2.3+b", "patch", "1.2.4"),
        ("1.2.0-rc.1", "minor", "1.2.0"),
        ("1.2.0-rc.1", "major", "2.0.0"),
        ("2.0.0-rc.1", "major", "2.0.0"),
        ("1.2.3-rc.1", "patch", "1.2.3"),
        ("1.2.3-rc.1", "minor", "1.3.0"),
    ],
)
def test_bump(text, part, next_):
    assert str(parse(text).bump(part)) == next_


@pytest.mark.parametrize(
    ("text", "next_"),
    [("1.2.3", "1.2.4-rc.1"), ("1.2.3-rc.9+b", "1.2.3-rc.10"), ("1.2.3-alpha", "1.2.3-alpha.1")],
)
def test_bump_of_prereleases(text, next_):
    assert str(parse(text).bump("prerelease")) == next_


def test_bump_of_nothing():
    with pytest.raises(ValueError):
        parse("1.0.0").bump("build")


def within(range_):
    versions = ["0.0.3", "0.0.4", "0.2.3", "0.3.0", "1.0.0", "1.2.2", "1.2.3", "1.2.9", "1.3.0", "2.0.0"]
    return [version for version in versions if matches(version, range_)]


def test_signs():
    assert within("1.2.3") == within("=1.2.3") == ["1.2.3"]
    assert within("<0.2.3") == ["0.0.3", "0.0.4"]
    assert within(">=1.3.0") == ["1.3.0", "2.0.0"]
    assert within(">1.3.0") == ["2.0.0"]
    assert within("<=0.0.3") == ["0.0.3"]


def test_all_of_a_set():
    assert within(">=1.0.0 <1.2.3") == ["1.0.0", "1.2.2"]


def test_one_of_several_sets():
    assert within("<0.0.4 || >=2.0.0||1.0.0") == ["0.0.3", "1.0.0", "2.0.0"]


def test_carets():
    assert within("^1.2.3") == ["1.2.3", "1.2.9", "1.3.0"]
    assert within("^0.2.3") == ["0.2.3"]
    assert within("^0.0.3") == ["0.0.3"]


def test_tildes():
    assert within("~1.2.3") == ["1.2.3", "1.2.9"]


def test_beginnings():
    assert within("1.2.x") == within("1.2") == ["1.2.2", "1.2.3", "1.2.9"]
    assert within("1.x") == within("1") == ["1.0.0", "1.2.2", "1.2.3", "1.2.9", "1.3.0"]
    assert within("*") == within("") == within("x") == within(">=0.0.0")


def test_prereleases_only_where_they_are_asked_for():
    assert not matches("1.2.3-rc.1", "*")
    assert not matches("1.2.3-rc.1", ">=1.0.0")
    assert matches("1.2.3-rc.2", ">1.2.3-rc.1")
    assert matches("1.2.3-rc.1", "^1.2.3-beta")
    assert not matches("1.2.4-rc.1", "^1.2.3-beta")
    assert matches("1.2.4", "^1.2.3-beta")


def test_a_version_or_a_text():
    assert matches(parse("1.2.3"), "1.x")


@pytest.mark.parametrize("range_", ["a", "^", "1.2.3 <", ">=1.2.3.4", "==1.2.3", "1.y", "^^1.0.0", "x.1"])
def test_what_is_no_range(range_):
    with pytest.raises(ValueError):
        matches("1.0.0", range_)


def test_latest():
    assert latest(["1.0.0", "1.10.0", "1.9.0", "2.0.0"], "^1.0.0") == "1.10.0"
    assert latest(["1.0.0+a", "1.0.0+b"]) == "1.0.0+a"
    assert latest(["1.0.0-rc.1"]) is None
    assert latest([], "*") is None
