"""What `table.py` must do: a test for each bug, and one for what is right already."""


def test_names() -> None:
    from table import names

    assert names({"tea": 3, "milk": 1}) == ["tea", "milk"]


def test_total() -> None:
    from table import total

    assert total({"tea": 3, "milk": 1}) == 4


def test_price() -> None:
    from table import price

    table = {"tea": 3}
    assert price(table, "tea") == 3
    assert table == {"tea": 3}


def test_merge() -> None:
    from table import merge

    table = {"tea": 3}
    merge(table, {"milk": 1})
    assert table == {"tea": 3, "milk": 1}


def test_has() -> None:
    from table import has

    assert has({"tea": 3}, "tea") and not has({}, "tea")
