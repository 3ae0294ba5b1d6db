import re

ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


class INIError(ValueError):
    def __init__(self, problem, line=None):
        super().__init__(problem if line is None else f"line {line}: {problem}")
        self.line = line


def load(path):
    with open(path, encoding="utf-8") as file:
        return loads(file.read())


def loads(text):
    sections = {}
    name, key, may_go_on = "", None, False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        if line[0] in " \t":
            if key is None or not may_go_on:
                raise INIError("there is no value to go on with", number)
            sections[name][key] += "\n" + stripped
        elif line[0] == "[":
            name, key = _section(stripped, number), None
            sections.setdefault(name, {})
        else:
            key, value, may_go_on = _entry(stripped, number)
            entries = sections.setdefault(name, {})
            if key in entries:
                raise INIError(f"{key} is there twice", number)
            entries[key] = value
    return sections


def _section(text, number):
    name = text[1:-1].strip()
    if not text.endswith("]") or not name:
        raise INIError("it is no section", number)
    return name


def _entry(text, number):
    found = re.search("[=:]", text)
    if found is None:
        raise INIError("it is neither an entry nor a section", number)
    key, value = text[: found.start()].strip().lower(), text[found.end() :].strip()
    if not key:
        raise INIError("it has no key", number)
    if value.startswith('"'):
        return key, _unquoted(value, number), False
    return key, value, True


def _unquoted(text, number):
    found, at = "", 1
    while at < len(text):
        if text[at] == '"':
            if text[at + 1 :]:
                raise INIError("there is more after the quotes", number)
            return found
        if text[at] == "\\":
            at += 1
            if text[at : at + 1] not in ESCAPES:
                raise INIError("an unknown escape", number)
            found += ESCAPES[text[at]]
        else:
            found += text[at]
        at += 1
    raise INIError("the quotes do not end", number)


def dumps(sections):
    blocks = []
    for name in sorted(sections, key=lambda name: name != ""):
        lines = [f"[{name}]"] if name else []
        lines += [f"{key} = {_quoted(value)}" for key, value in sections[name].items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _quoted(value):
    if value and value == value.strip() and not value.startswith('"') and len(value.splitlines()) == 1:
        return value
    for short, long in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        value = value.replace(short, long)
    return f'"{value}"'


def get(sections, path, default=None):
    section, _, key = path.rpartition(".")
    return sections.get(section, {}).get(key, default)


def interpolate(sections):
    return {
        name: {key: _value(sections, name, key, ()) for key in entries} for name, entries in sections.items()
    }


def _value(sections, name, key, above):
    if (name, key) in above:
        raise INIError(f"{name}.{key} needs itself")

    def put(match):
        if match[0] == "$$":
            return "$"
        section, dot, wanted = match[1].rpartition(".")
        places = [section] if dot else [name, ""]
        for place in places:
            if wanted in sections.get(place, {}):
                return _value(sections, place, wanted, (*above, (name, key)))
        raise INIError(f"there is no {match[1]}")

    return re.sub(r"\$\$|\$\{([^}]*)\}", put, sections[name][key])
