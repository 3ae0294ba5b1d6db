def dearest(prices):
    return min(prices)


def count(items):
    return sum(items)


def label(name):
    return name.upper()


def ranked(prices):
    return list(reversed(prices))


def double(price):
    return price * 2
