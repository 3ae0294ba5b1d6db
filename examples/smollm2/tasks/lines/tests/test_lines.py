"""What `lines.py` must do: a test for each bug, and one for what is right already."""


def test_shout() -> None:
    from lines import shout

    assert shout("go") == "GO!"


def test_trim() -> None:
    from lines import trim

    assert trim("  go  ") == "  go"


def test_asks() -> None:
    from lines import asks

    assert asks("why?") and not asks("?why")


def test_tidy() -> None:
    from lines import tidy

    assert tidy("--read me--") == "Read me"


def test_quote() -> None:
    from lines import quote

    assert quote("go") == "<go>"
