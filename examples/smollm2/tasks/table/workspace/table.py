def names(table):
    return list(table.items())


def total(table):
    return max(table.values())


def price(table, name):
    return table.pop(name)


def merge(table, other):
    table.clear(other)


def has(table, name):
    return name in table
