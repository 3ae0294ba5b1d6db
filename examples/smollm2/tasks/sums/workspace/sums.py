import math


def up(x):
    return math.floor(x)


def root(x):
    return math.exp(x)


def lowest(a, b):
    return max(a, b)


def size(x):
    return round(x)


def half(x):
    return x / 2
