import re
import unicodedata


def split_row(line):
    line = line.strip().removeprefix("|")
    cells = [""]
    at = 0
    while at < len(line):
        if line.startswith("\\|", at):
            cells[-1] += "|"
            at += 2
        elif line[at] == "|":
            cells.append("")
            at += 1
        else:
            cells[-1] += line[at]
            at += 1
    if line.endswith("|") and not line.endswith("\\|"):
        cells.pop()
    return [cell.strip() for cell in cells]


def _width(text):
    wide = {"W": 2, "F": 2}
    return sum(0 if unicodedata.combining(c) else wide.get(unicodedata.east_asian_width(c), 1) for c in text)


def _padded(text, width, align):
    room = width - _width(text)
    before = {"right": room, "center": room // 2}.get(align, 0)
    return " " * before + text + " " * (room - before)


def _rule(width, align):
    left = ":" if align in ("left", "center") else "-"
    right = ":" if align in ("right", "center") else "-"
    return left + "-" * width + right


class Table:
    def __init__(self, header, rows, align=None):
        self.header = [str(cell) for cell in header]
        self.rows = [[str(cell) for cell in row] for row in rows]
        self.align = list(align) if align is not None else [None] * len(self.header)

    def render(self):
        lines = [[_written(cell) for cell in row] for row in (self.header, *self.rows)]
        widths = [max(3, *map(_width, column)) for column in zip(*lines, strict=True)]
        texts = ["| " + " | ".join(map(_padded, row, widths, self.align)) + " |" for row in lines]
        texts.insert(1, "|" + "|".join(map(_rule, widths, self.align)) + "|")
        return "\n".join(texts)


def _written(cell):
    return cell.replace("|", "\\|").replace("\n", " ")


def parse(text):
    lines = text.splitlines()
    if len(lines) < 2:
        raise ValueError("a table has two lines at least")
    header, marks = split_row(lines[0]), split_row(lines[1])
    if len(header) != len(marks) or "|" not in lines[0] or not all(re.fullmatch(":?-+:?", m) for m in marks):
        raise ValueError("the second line is not that of a table")
    names = {(True, True): "center", (True, False): "left", (False, True): "right", (False, False): None}
    align = [names[mark.startswith(":"), mark.endswith(":")] for mark in marks]
    rows = []
    for line in lines[2:]:
        if "|" not in line:
            break
        cells = split_row(line)[: len(header)]
        rows.append(cells + [""] * (len(header) - len(cells)))
    return Table(header, rows, align)


def format_text(text):
    lines, done, at, is_code = text.split("\n"), [], 0, False
    while at < len(lines):
        if lines[at].startswith("```"):
            is_code = not is_code
        table = None
        if not is_code and "|" in lines[at]:
            try:
                table = parse("\n".join(lines[at:]))
            except ValueError:
                table = None
        if table is None:
            done.append(lines[at])
            at += 1
        else:
            done.append(table.render())
            at += 2 + len(table.rows)
    return "\n".join(done)


def from_records(records, columns=None):
    if columns is None:
        columns = list(dict.fromkeys(key for record in records for key in record))
    rows = [[record.get(column, "") for column in columns] for record in records]
    align = []
    for column in columns:
        values = [record[column] for record in records if column in record]
        is_number = bool(values) and all(type(value) in (int, float) for value in values)
        align.append("right" if is_number else None)
    return Table(columns, rows, align)
