def fizz(n):
    return "fizz" * (n % 3 == 0) + "buzz" * (n % 5 == 0) or str(n)


def count(last):
    return [fizz(n) for n in range(1, last + 1)]
