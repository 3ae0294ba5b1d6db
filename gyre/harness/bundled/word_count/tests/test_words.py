import subprocess
import sys

import words


def test_words_in_order():
    assert words.words("The cat, the DOG.") == ["the", "cat", "the", "dog"]


def test_apostrophes_belong_to_words():
    assert words.words("don't 'quote' rock'n'roll") == ["don't", "'quote'", "rock'n'roll"]


def test_apostrophes_alone_are_no_word():
    assert words.words("a ' b '' c") == ["a", "b", "c"]


def test_digits_are_words():
    assert words.words("v2, 3.14") == ["v2", "3", "14"]


def test_letters_of_other_languages():
    assert words.words("Äpfel und ÖL") == ["äpfel", "und", "öl"]


def test_underscores_part_words():
    assert words.words("snake_case") == ["snake", "case"]


def test_count():
    assert words.count("a b A") == {"a": 2, "b": 1}
    assert words.count("") == {}


def test_top():
    assert words.top("c b a b c d", 3) == [("b", 2), ("c", 2), ("a", 1)]


def test_top_of_few():
    assert words.top("x", 5) == [("x", 1)]
    assert words.top("x y", 0) == []


def test_program(tmp_path):
    (tmp_path / "text").write_text("one two two three three three")
    done = subprocess.run(
        [sys.executable, "words.py", str(tmp_path / "text")], capture_output=True, text=True, timeout=10
    )
    assert done.stdout.splitlines() == ["3 three", "2 two", "1 one"]
