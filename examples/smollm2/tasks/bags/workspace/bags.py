def shared(a, b):
    return a.union(b)


def unique(words):
    return list(words)


def holds(a, b):
    return a.issubset(b)


def text(words):
    return " ".join(reversed(words))


def number(bag):
    return len(bag)
