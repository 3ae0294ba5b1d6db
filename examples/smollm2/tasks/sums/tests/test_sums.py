"""What `sums.py` must do: a test for each bug, and one for what is right already."""


def test_lowest() -> None:
    from sums import lowest

    assert lowest(4, 2) == 2


def test_root() -> None:
    from sums import root

    assert root(9) == 3


def test_size() -> None:
    from sums import size

    assert size(-5) == 5


def test_up() -> None:
    from sums import up

    assert up(1.2) == 2


def test_half() -> None:
    from sums import half

    assert half(8) == 4
