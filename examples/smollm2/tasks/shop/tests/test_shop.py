"""What `shop.py` must do: a test for each bug, and one for what is right already."""


def test_dearest() -> None:
    from shop import dearest

    assert dearest([3, 9, 4]) == 9


def test_count() -> None:
    from shop import count

    assert count(["tea", "milk"]) == 2


def test_label() -> None:
    from shop import label

    assert label("Green Tea") == "green tea"


def test_ranked() -> None:
    from shop import ranked

    assert ranked([2, 1, 3]) == [1, 2, 3]


def test_double() -> None:
    from shop import double

    assert double(4) == 8
