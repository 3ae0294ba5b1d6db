def price(table, name):
    return table.pop(name)


def names(table):
    return list(table.items())


def merge(table, other):
    table.clear(other)


def total(table):
    return max(table.values())


def has(table, name):
    return name in table
