"""What `bags.py` must do: a test for each bug, and one for what is right already."""


def test_shared() -> None:
    from bags import shared

    assert shared({1, 2}, {2, 3}) == {2}


def test_unique() -> None:
    from bags import unique

    assert unique(["a", "b", "a"]) == {"a", "b"}


def test_holds() -> None:
    from bags import holds

    assert holds({1, 2}, {1}) and not holds({1}, {1, 2})


def test_text() -> None:
    from bags import text

    assert text(["b", "c", "a"]) == "a b c"


def test_number() -> None:
    from bags import number

    assert number({1, 2}) == 2
