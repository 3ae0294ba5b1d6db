def passed(marks):
    return any(marks)


def verbose(options):
    return options.get("verbose", False)


def known(user, users):
    return user not in users


def whole(text):
    return float(text)


def empty(text):
    return text == ""
