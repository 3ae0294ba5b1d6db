import fizz


def test_other_numbers():
    assert [fizz.fizz(n) for n in (1, 2, 98)] == ["1", "2", "98"]


def test_by_three():
    assert [fizz.fizz(n) for n in (3, 9, 27)] == ["fizz"] * 3


def test_by_five():
    assert [fizz.fizz(n) for n in (5, 10, 25)] == ["buzz"] * 3


def test_by_both():
    assert [fizz.fizz(n) for n in (15, 30, 0)] == ["fizzbuzz"] * 3


def test_count():
    assert fizz.count(5) == ["1", "2", "fizz", "4", "buzz"]
    assert len(fizz.count(100)) == 100


def test_count_of_nothing():
    assert fizz.count(0) == fizz.count(-3) == []
