import math
import operator
import re

TOKEN = re.compile(
    r"(?P<number>(?:\d+(?:_\d+)*)?\.\d+(?:_\d+)*(?:[eE][+-]?\d+)?|\d+(?:_\d+)*\.?(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[^\W\d]\w*)|(?P<sign>\*\*|//|<=|>=|==|!=|[-+*/%()<>,=])"
)
KNOWN = {"True": True, "False": False, "pi": math.pi, "e": math.e}
FUNCTIONS = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "sqrt": math.sqrt,
    "floor": math.floor,
    "ceil": math.ceil,
}
WORDS = {"if", "else", "and", "or", "not", "lambda"}
BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
MAX_DEPTH = 50
FAULTS = (TypeError, ValueError, ArithmeticError)


class CalcError(ValueError):
    def __init__(self, problem, position):
        super().__init__(problem)
        self.position = position


def tokens(text):
    found, at = [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = TOKEN.match(text, at)
        if match is None:
            raise CalcError(f"unknown character {text[at]!r}", at)
        found.append((match.lastgroup, match[0], at))
        at = match.end()
    return [*found, ("end", "", len(text))]


class Scope:
    """`outer` are the names that a function sees beside its arguments."""

    def __init__(self, names, functions, outer=None, depth=0):
        self.names = names
        self.functions = functions
        self.outer = names if outer is None else outer
        self.depth = depth


class Parser:
    """Makes functions of a scope; `names` are those that it met."""

    def __init__(self, words):
        self.words = words
        self.at = 0
        self.depth = 0
        self.names = set()

    def peek(self):
        return self.words[self.at][1] if self.words[self.at][0] != "number" else ""

    def take(self, *wanted):
        kind, text, at = self.words[self.at]
        if kind == "number" or text not in wanted:
            raise CalcError(f"{' or '.join(wanted)} is missing", at)
        self.at += 1
        return at

    def whole(self):
        found = self.expression()
        kind, text, at = self.words[self.at]
        if kind != "end":
            raise CalcError(f"unexpected {text!r}", at)
        return found

    def expression(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise CalcError("too deep", self.words[self.at][2])
        value = self.either()
        if self.peek() == "if":
            self.take("if")
            condition = self.either()
            self.take("else")
            other = self.expression()
            yes = value

            def value(scope):
                return yes(scope) if condition(scope) else other(scope)

        self.depth -= 1
        return value

    def either(self):
        parts = [self.both()]
        while self.peek() == "or":
            self.take("or")
            parts.append(self.both())
        return parts[0] if len(parts) == 1 else lambda scope: _first(parts, scope, True)

    def both(self):
        parts = [self.negation()]
        while self.peek() == "and":
            self.take("and")
            parts.append(self.negation())
        return parts[0] if len(parts) == 1 else lambda scope: _first(parts, scope, False)

    def negation(self):
        count = 0
        while self.peek() == "not":
            self.take("not")
            count += 1
        value = self.comparison()
        if not count:
            return value
        return lambda scope: bool(value(scope)) == (count % 2 == 0)

    def comparison(self):
        parts, signs = [self.sum()], []
        while self.peek() in ("<", "<=", ">", ">=", "==", "!="):
            sign = self.peek()
            signs.append((sign, self.take(sign)))
            parts.append(self.sum())
        if not signs:
            return parts[0]

        def value(scope):
            left = parts[0](scope)
            for (sign, at), part in zip(signs, parts[1:], strict=True):
                right = part(scope)
                if not _done(BINARY[sign], at, left, right):
                    return False
                left = right
            return True

        return value

    def sum(self):
        return self.row(("+", "-"), self.product)

    def product(self):
        return self.row(("*", "/", "//", "%"), self.signed)

    def row(self, signs, part):
        first, rest = part(), []
        while self.peek() in signs:
            sign = self.peek()
            rest.append((sign, self.take(sign), part()))

        def value(scope):
            found = first(scope)
            for sign, at, right in rest:
                found = _done(BINARY[sign], at, found, right(scope))
            return found

        return value if rest else first

    def signed(self):
        signs = []
        while self.peek() in ("-", "+"):
            sign = self.peek()
            signs.append((operator.neg if sign == "-" else operator.pos, self.take(sign)))
        value = self.power()

        def changed(scope):
            found = value(scope)
            for function, at in reversed(signs):
                found = _done(function, at, found)
            return found

        return changed if signs else value

    def power(self):
        base = self.atom()
        if self.peek() != "**":
            return base
        at = self.take("**")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise CalcError("too deep", at)
        exponent = self.signed()
        self.depth -= 1
        return lambda scope: _done(operator.pow, at, base(scope), exponent(scope))

    def atom(self):
        kind, text, at = self.words[self.at]
        if kind == "number":
            self.at += 1
            digits = text.replace("_", "")
            number = int(digits) if digits.isdigit() else float(digits)
            return lambda scope: number
        if text == "(":
            self.take("(")
            value = self.expression()
            self.take(")")
            return value
        if kind != "name" or text in WORDS:
            raise CalcError("a value is missing", at)
        self.at += 1
        if self.peek() == "(":
            return self.call(text, at)
        self.names.add(text)

        def named(scope):
            for names in (scope.names, KNOWN):
                if text in names:
                    return names[text]
            raise CalcError(f"unknown name {text}", at)

        return named

    def call(self, name, at):
        self.take("(")
        arguments = []
        if self.peek() != ")":
            arguments.append(self.expression())
            while self.peek() == ",":
                self.take(",")
                arguments.append(self.expression())
        self.take(")")

        def called(scope):
            function = scope.functions.get(name, FUNCTIONS.get(name))
            if function is None:
                raise CalcError(f"unknown function {name}", at)
            values = [argument(scope) for argument in arguments]
            if isinstance(function, Defined):
                return function(scope, at, values)
            return _done(function, at, *values)

        return called


class Defined:
    def __init__(self, arguments, value):
        self.arguments = arguments
        self.value = value

    def __call__(self, scope, at, values):
        if len(values) != len(self.arguments):
            raise CalcError("a wrong number of arguments", at)
        if scope.depth >= MAX_DEPTH:
            raise CalcError("too deep", at)
        names = {**scope.outer, **dict(zip(self.arguments, values, strict=True))}
        return self.value(Scope(names, scope.functions, scope.outer, scope.depth + 1))


def _first(parts, scope, wanted):
    for part in parts:
        value = part(scope)
        if bool(value) is wanted:
            return value
    return value


def _done(function, at, *values):
    try:
        return function(*values)
    except CalcError:
        raise
    except FAULTS as error:
        raise CalcError(str(error), at) from error


def evaluate(text, names=None, functions=None):
    return Parser(tokens(text)).whole()(Scope(names or {}, functions or {}))


def variables(text):
    parser = Parser(tokens(text))
    parser.whole()
    return parser.names - set(KNOWN)


class Calculator:
    def __init__(self):
        self.names = {}
        self._functions = {}

    def run(self, line):
        words = tokens(line.partition("#")[0])
        if len(words) == 1:
            return None
        signs = [text for _, text, _ in words]
        if "=" not in signs:
            return self._value(words)
        at = signs.index("=")
        head, body = words[:at], words[at + 1 :]
        if not head or head[0][0] != "name" or head[0][1] in WORDS or (at == 1 and head[0][1] in KNOWN):
            raise CalcError("it cannot be set", words[0][2])
        name = head[0][1]
        if at == 1:
            self.names[name] = self._value(body)
            return self.names[name]
        self._functions[name] = Defined(_arguments(head), Parser(body).whole())
        return None

    def _value(self, words):
        return Parser(words).whole()(Scope(self.names, self._functions))


def _arguments(head):
    inner = head[2:-1]
    names, commas = inner[::2], inner[1::2]
    is_list = len(inner) % 2 == 1 or not inner
    if (head[1][1], head[-1][1]) != ("(", ")") or not is_list or any(word[1] != "," for word in commas):
        raise CalcError("it cannot be set", head[0][2])
    found = [text for kind, text, _ in names if kind == "name" and text not in WORDS]
    if len(found) != len(names) or len(set(found)) != len(found):
        raise CalcError("its arguments are no names", head[0][2])
    return found
