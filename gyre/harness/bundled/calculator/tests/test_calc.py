import math
import subprocess
import sys

import pytest
from calc import CalcError, Calculator, evaluate, variables


def position(text, **given):
    with pytest.raises(CalcError) as error:
        evaluate(text, **given)
    return error.value.position


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("1.5", 1.5), (".5", 0.5), ("2e3", 2000.0), ("1.5E-2", 0.015), ("1_000", 1000), ("5.", 5.0)],
)
def test_numbers(text, value):
    found = evaluate(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "1 + 2 * 3",
        "(1 + 2) * 3",
        "10 - 3 - 2",
        "2 * 3 % 4",
        "7 / 2",
        "7 // 2",
        "7 // -2",
        "-7 % 3",
        "8 / 2 / 2",
    ],
)
def test_arithmetic(text):
    assert evaluate(text) == eval(text)


@pytest.mark.parametrize(
    "text", ["2 ** 3 ** 2", "-2 ** 2", "2 ** -1", "--3", "-+-3", "2 * -3", "(-2) ** 2", "-2 ** -2"]
)
def test_powers_and_signs(text):
    assert evaluate(text) == eval(text)


@pytest.mark.parametrize(
    "text", ["1 < 2", "2 <= 1", "1 == 1.0", "1 != 1", "1 + 1 > 1", "1 < 2 < 3", "1 < 3 < 2", "3 > 2 != 2"]
)
def test_comparisons(text):
    assert evaluate(text) is eval(text)


@pytest.mark.parametrize(
    "text",
    [
        "1 and 2",
        "0 and 2",
        "0 or 3",
        "1 or 3",
        "not 0",
        "not 1 == 2",
        "1 or 0 and 0",
        "not not 2",
        "1 < 2 and 3",
    ],
)
def test_logic(text):
    assert evaluate(text) == eval(text)


def test_logic_goes_no_further_than_needed():
    assert evaluate("0 and 1 / 0") == 0
    assert evaluate("1 or gone") == 1
    assert evaluate("2 if 1 else 1 / 0") == 2


@pytest.mark.parametrize(
    "text", ["1 if 2 else 3", "1 if 0 else 3", "1 if 0 else 2 if 0 else 3", "1 + (2 if 0 else 3)"]
)
def test_conditions(text):
    assert evaluate(text) == eval(text)


def test_names():
    assert evaluate("x * _y2", {"x": 2, "_y2": 3}) == 6
    assert evaluate("pi + e") == math.pi + math.e
    assert evaluate("True") is True
    assert evaluate("e", {"e": 1}) == 1


def test_functions():
    assert evaluate("max(1, abs(-3), min(2, 0)) + sqrt(16)") == 7.0
    assert evaluate("floor(2.7) + ceil(2.1) + round(2.567, 1)") == 7.6
    assert evaluate("f(2)", functions={"f": lambda x: x * 10}) == 20
    assert evaluate("abs(2)", functions={"abs": lambda x: "mine"}) == "mine"


def test_blanks_mean_nothing():
    assert evaluate("  1\n+\t2 ") == evaluate("1+2") == 3
    assert evaluate("3if 1else 4") == 3


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("", 0),
        ("1 +", 3),
        ("(1", 2),
        ("1 2", 2),
        ("1 + * 2", 4),
        (")", 0),
        ("f(", 2),
        ("1 if 2", 6),
        ("max(1,,2)", 6),
    ],
)
def test_what_is_no_expression(text, at):
    assert position(text, functions={"f": abs}) == at


@pytest.mark.parametrize(
    ("text", "at"), [("1 $ 2", 2), ("'a'", 0), ("x.y", 1), ("[1]", 0), ("1 = 2", 2), ("1_", 1)]
)
def test_characters_that_are_none(text, at):
    assert position(text, names={"x": 1}) == at


def test_unknown_names():
    assert position("1 + gone") == 4
    assert position("2 * gone(1)") == 4


def test_no_way_to_the_language():
    assert position("__import__") == 0
    assert position("open(1)") == 0
    assert position("1 if lambda else 2") == 5


def test_wrong_arguments():
    assert position("1 + sqrt(1, 2)") == 4
    assert position("1 + sqrt(-1)") == 4
    assert position("abs()") == 0


def test_divisions_by_zero():
    assert [position(text) for text in ("1 / 0", "12 // 0", "5 % 0.0")] == [2, 3, 2]


def test_values_that_do_not_go_together():
    assert position("1 + x", names={"x": "a"}) == 2
    assert position("x < 1", names={"x": "a"}) == 2
    assert position("-x", names={"x": "a"}) == 0


def test_results_that_are_too_large():
    assert position("2.0 ** 100000") == 4


def test_depth():
    assert evaluate("(" * 40 + "1" + ")" * 40) == 1
    assert position("(" * 100_000 + "1" + ")" * 100_000) is not None


def test_long_ones():
    assert evaluate("+".join(["1"] * 3000)) == 3000


def test_an_error_is_a_value_error():
    assert issubclass(CalcError, ValueError)


def test_variables():
    assert variables("x + f(y) * pi if z else x") == {"x", "y", "z"}
    assert variables("1") == set()
    with pytest.raises(CalcError):
        variables("1 +")


def test_a_calculator_keeps_names():
    calculator = Calculator()
    assert calculator.run("x = 2 + 1") == 3
    assert calculator.run("y = x * 2") == 6
    assert calculator.run("x + y") == 9
    assert calculator.names == {"x": 3, "y": 6}


def test_a_comparison_sets_nothing():
    calculator = Calculator()
    calculator.run("x = 1")
    assert calculator.run("x == 1") is True


def test_comments():
    calculator = Calculator()
    assert calculator.run("") is calculator.run("  # nothing") is None
    assert calculator.run("1 + 1  # two") == 2


def test_functions_of_its_own():
    calculator = Calculator()
    assert calculator.run("area(w, h) = w * h * scale") is None
    calculator.run("scale = 2")
    assert calculator.run("area(2, 3)") == 12
    calculator.run("scale = 10")
    assert calculator.run("area(2, 3)") == 60


def test_arguments_go_before_names():
    calculator = Calculator()
    calculator.run("x = 1")
    calculator.run("f(x) = x + 1")
    assert calculator.run("f(10)") == 11
    assert calculator.names == {"x": 1}


def test_functions_that_call_themselves():
    calculator = Calculator()
    calculator.run("fact(n) = 1 if n < 2 else n * fact(n - 1)")
    assert calculator.run("fact(20)") == math.factorial(20)


def test_functions_that_never_end():
    calculator = Calculator()
    calculator.run("f(n) = f(n + 1)")
    with pytest.raises(CalcError):
        calculator.run("f(0)")


def test_functions_of_its_own_with_wrong_arguments():
    calculator = Calculator()
    calculator.run("f(a) = a")
    with pytest.raises(CalcError):
        calculator.run("f(1, 2)")


@pytest.mark.parametrize("line", ["pi = 3", "True = 1", "1 = 2", "f(1) = 2", "x =", "= 1", "f(a, a) = a"])
def test_what_cannot_be_set(line):
    with pytest.raises(CalcError):
        Calculator().run(line)


def test_a_line_that_fails_sets_nothing():
    calculator = Calculator()
    with pytest.raises(CalcError):
        calculator.run("x = 1 / 0")
    assert calculator.names == {}


def run(*words):
    return subprocess.run([sys.executable, "-m", "calc", *words], capture_output=True, text=True, timeout=10)


def test_program():
    done = run("1 + 2 * 3")
    assert (done.returncode, done.stdout) == (0, "7\n")


def test_program_with_an_error():
    done = run("1 + ")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error at 4: ")
