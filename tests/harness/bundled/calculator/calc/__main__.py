import sys

from calc import CalcError, evaluate

try:
    print(evaluate(sys.argv[1]))
except CalcError as error:
    print(f"error at {error.position}: {error}", file=sys.stderr)
    sys.exit(1)
