"""What `stack.py` must do: a test for each bug, and one for what is right already."""


def test_depth() -> None:
    from stack import depth

    assert depth([5, 7, 9, 1]) == 4


def test_drop() -> None:
    from stack import drop

    stack = [1, 2]
    drop(stack)
    assert stack == []


def test_push() -> None:
    from stack import push

    stack = [1]
    push(stack, 2)
    assert stack == [1, 2]


def test_backward() -> None:
    from stack import backward

    assert backward([2, 3, 1]) == [1, 3, 2]


def test_has() -> None:
    from stack import has

    assert has([1, 2], 2) and not has([1], 2)
