def shout(line):
    return line.lower() + "!"


def trim(line):
    return line.lstrip()


def asks(line):
    return line.startswith("?")


def tidy(line):
    return line.strip("-").title()


def quote(line):
    return "<" + line + ">"
