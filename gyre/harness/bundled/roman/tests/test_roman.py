import pytest
import roman

KNOWN = {
    1: "I",
    3: "III",
    4: "IV",
    9: "IX",
    14: "XIV",
    40: "XL",
    90: "XC",
    400: "CD",
    1994: "MCMXCIV",
    3999: "MMMCMXCIX",
}


def test_to_roman():
    assert {number: roman.to_roman(number) for number in KNOWN} == KNOWN


def test_from_roman():
    assert {roman.from_roman(text): text for text in KNOWN.values()} == KNOWN


def test_small_letters():
    assert roman.from_roman("mcmxciv") == 1994


def test_all_there_and_back():
    assert all(roman.from_roman(roman.to_roman(number)) == number for number in range(1, 4000))


@pytest.mark.parametrize("number", [0, -1, 4000])
def test_numbers_without_a_numeral(number):
    with pytest.raises(ValueError):
        roman.to_roman(number)


@pytest.mark.parametrize("number", [1.0, "1", None, True])
def test_what_is_no_number(number):
    with pytest.raises(TypeError):
        roman.to_roman(number)


@pytest.mark.parametrize("text", ["", "IIII", "VX", "IC", "ABC", "XIIX", "MMMM", " X", "X1"])
def test_what_is_no_numeral(text):
    with pytest.raises(ValueError):
        roman.from_roman(text)


def test_add():
    assert roman.add("IX", "i") == "X"


def test_a_sum_that_is_too_large():
    with pytest.raises(ValueError):
        roman.add("MMM", "M")
