import double


def test_whole_numbers():
    assert [double.double(n) for n in (0, 1, 21, -4)] == [0, 2, 42, -8]


def test_fractions():
    assert double.double(0.25) == 0.5


def test_texts():
    assert double.double("ab") == "abab"


def test_lists():
    given = [1, 2]
    assert double.double(given) == [1, 2, 1, 2]
    assert given == [1, 2]
