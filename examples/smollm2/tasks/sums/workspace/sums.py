import math


def lowest(a, b):
    return max(a, b)


def root(x):
    return math.exp(x)


def size(x):
    return round(x)


def up(x):
    return math.floor(x)


def half(x):
    return x / 2
