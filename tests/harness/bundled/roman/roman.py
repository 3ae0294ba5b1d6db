SIGNS = [
    (1000, "M"),
    (900, "CM"),
    (500, "D"),
    (400, "CD"),
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (40, "XL"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
    (1, "I"),
]


def to_roman(number):
    if type(number) is not int:
        raise TypeError(f"{number!r} is no int")
    if not 1 <= number <= 3999:
        raise ValueError(f"{number} has no numeral")
    found = ""
    for value, sign in SIGNS:
        found += sign * (number // value)
        number %= value
    return found


NUMERALS = {to_roman(number): number for number in range(1, 4000)}


def from_roman(text):
    try:
        return NUMERALS[text.upper()]
    except KeyError:
        raise ValueError(f"{text!r} is no numeral") from None


def add(a, b):
    return to_roman(from_roman(a) + from_roman(b))
