import functools
import re

_PART = "(?:0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_NUMBER = "(0|[1-9][0-9]*)"
_VERSION = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-({_PART}(?:\.{_PART})*))?(?:\+([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?"
)


@functools.total_ordering
class Version:
    def __init__(self, major, minor, patch, prerelease=(), build=()):
        self.major = major
        self.minor = minor
        self.patch = patch
        self.prerelease = prerelease
        self.build = build

    @property
    def numbers(self):
        return (self.major, self.minor, self.patch)

    def _key(self):
        parts = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in self.prerelease)
        return (*self.numbers, not parts, parts)

    def __eq__(self, other):
        return self._key() == other._key() if isinstance(other, Version) else NotImplemented

    def __lt__(self, other):
        return self._key() < other._key() if isinstance(other, Version) else NotImplemented

    def __hash__(self):
        return hash(self._key())

    def __str__(self):
        text = ".".join(map(str, self.numbers))
        text += "-" + ".".join(self.prerelease) if self.prerelease else ""
        return text + ("+" + ".".join(self.build) if self.build else "")

    def bump(self, part):
        major, minor, patch = self.numbers
        is_pre = bool(self.prerelease)
        if part == "major":
            return Version(major + (not (is_pre and minor == patch == 0)), 0, 0)
        if part == "minor":
            return Version(major, minor + (not (is_pre and patch == 0)), 0)
        if part == "patch":
            return Version(major, minor, patch + (not is_pre))
        if part != "prerelease":
            raise ValueError(f"{part!r} is no part")
        if not is_pre:
            return Version(major, minor, patch + 1, ("rc", "1"))
        *first, last = self.prerelease
        parts = (*first, str(int(last) + 1)) if last.isdigit() else (*first, last, "1")
        return Version(major, minor, patch, parts)


def parse(text):
    found = _VERSION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no version")
    numbers = map(int, found.groups()[:3])
    return Version(*numbers, *(tuple(part.split(".")) if part else () for part in found.groups()[3:]))


def matches(version, range):
    version = parse(version) if isinstance(version, str) else version
    sets = [[_condition(word) for word in part.split()] for part in range.split("||")]
    return any(_holds(version, conditions) for conditions in sets)


def _holds(version, conditions):
    if version.prerelease and not any(
        bound.prerelease and bound.numbers == version.numbers for bound, _ in conditions if bound is not None
    ):
        return False
    return all(test(version) for _, test in conditions)


def _condition(word):
    start = re.fullmatch(rf"(?:{_NUMBER}(?:\.{_NUMBER})?)?\.?[x*]|{_NUMBER}(?:\.{_NUMBER})?", word)
    if start is not None and not word.startswith("."):
        numbers = tuple(int(part) for part in word.split(".") if part not in "x*")
        return None, lambda version: version.numbers[: len(numbers)] == numbers
    sign = re.match("[<>]=?|[=^~]|", word)[0]
    bound = parse(word[len(sign) :])
    if sign in "^~" and sign:
        until = _until(sign, bound)
        return bound, lambda version: version >= bound and version.numbers < until
    tests = {
        "": lambda version: version == bound,
        "=": lambda version: version == bound,
        "<": lambda version: version < bound,
        "<=": lambda version: version <= bound,
        ">": lambda version: version > bound,
        ">=": lambda version: version >= bound,
    }
    return bound, tests[sign]


def _until(sign, bound):
    if sign == "~" or (bound.major == 0 and bound.minor):
        return (bound.major, bound.minor + 1, 0)
    return (bound.major + 1, 0, 0) if bound.major else (0, 0, bound.patch + 1)


def latest(versions, range="*"):
    found = [text for text in versions if matches(text, range)]
    return max(found, key=parse) if found else None
