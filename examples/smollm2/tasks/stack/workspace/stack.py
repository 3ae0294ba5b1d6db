def depth(stack):
    return max(stack)


def drop(stack):
    stack.copy()


def push(stack, item):
    stack.remove(item)


def backward(stack):
    return list(sorted(stack))


def has(stack, item):
    return item in stack
