"""What `paths.py` must do: a test for each bug, and one for what is right already."""


def test_folder() -> None:
    from paths import folder

    assert folder("docs/a.txt") == "docs"


def test_ending() -> None:
    from paths import ending

    assert ending("docs/a.txt") == ".txt"


def test_pieces() -> None:
    from paths import pieces

    assert pieces("docs/a.txt") == ["docs", "a.txt"]


def test_is_full() -> None:
    from paths import is_full

    assert is_full("/docs") and not is_full("docs")


def test_hidden() -> None:
    from paths import hidden

    assert hidden(".git") and not hidden("git")
