from pathlib import PurePosixPath as Path


def folder(path):
    return str(Path(path).name)


def ending(path):
    return Path(path).stem


def pieces(path):
    return list(Path(path).parents)


def is_full(path):
    return Path(path).is_reserved()


def hidden(path):
    return path.startswith(".")
