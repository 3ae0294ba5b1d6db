"""What `checks.py` must do: a test for each bug, and one for what is right already."""


def test_passed() -> None:
    from checks import passed

    assert passed([True, True]) and not passed([True, False])


def test_verbose() -> None:
    from checks import verbose

    assert verbose({}) is True


def test_known() -> None:
    from checks import known

    assert known("ann", ["ann", "bob"]) and not known("eve", ["ann"])


def test_whole() -> None:
    from checks import whole

    assert isinstance(whole("7"), int) and whole("7") == 7


def test_empty() -> None:
    from checks import empty

    assert empty("") and not empty("a")
