import re


def diff(a, b):
    return _ordered(_edits(a, b))


def _edits(a, b):
    """Myers' greedy walk, with the furthest points of each distance kept for the way back."""
    trace, furthest = [], {1: 0}
    for d in range(len(a) + len(b) + 1):
        trace.append(dict(furthest))
        for k in range(-d, d + 1, 2):
            down = k == -d or (k != d and furthest[k - 1] < furthest[k + 1])
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            furthest[k] = x
            if x >= len(a) and x - k >= len(b):
                return _back(a, b, trace, d)
    return []


def _back(a, b, trace, distance):
    found, x, y = [], len(a), len(b)
    for d in range(distance, -1, -1):
        furthest, k = trace[d], x - y
        down = k == -d or (k != d and furthest[k - 1] < furthest[k + 1])
        before = k + 1 if down else k - 1
        start = furthest[before] if d else 0
        first = 0 if not d else start if down else start + 1
        while x > first and y > 0:
            x, y = x - 1, y - 1
            found.append(("keep", a[x]))
        if d == 0:
            break
        if down:
            y -= 1
            found.append(("add", b[y]))
        else:
            x -= 1
            found.append(("remove", a[x]))
    return found[::-1]


def _ordered(operations):
    done, run = [], []
    for operation in [*operations, None]:
        if operation is not None and operation[0] != "keep":
            run.append(operation)
            continue
        done += sorted(run, key=lambda found: found[0] != "remove")
        run = []
        if operation is not None:
            done.append(operation)
    return done


def distance(a, b):
    return sum(kind != "keep" for kind, _ in diff(a, b))


def apply(a, operations):
    if [item for kind, item in operations if kind != "add"] != list(a):
        raise ValueError("they were made for another list")
    return [item for kind, item in operations if kind != "remove"]


def reverse(operations):
    other = {"keep": "keep", "add": "remove", "remove": "add"}
    return _ordered([(other[kind], item) for kind, item in operations])


def unified(a, b, context=3):
    operations = diff(a, b)
    changed = [at for at, (kind, _) in enumerate(operations) if kind != "keep"]
    hunks = []
    for at in changed:
        if hunks and at - hunks[-1][1] - 1 <= 2 * context:
            hunks[-1][1] = at
        else:
            hunks.append([at, at])
    lines = []
    for first, last in hunks:
        first, last = max(0, first - context), min(len(operations), last + 1 + context)
        before = operations[:first]
        part = operations[first:last]
        old, new = (
            _span(sum(kind != other for kind, _ in before), sum(kind != other for kind, _ in part))
            for other in ("add", "remove")
        )
        lines.append(f"@@ -{old} +{new} @@")
        lines += [{"keep": " ", "add": "+", "remove": "-"}[kind] + str(item) for kind, item in part]
    return lines


def _span(before, count):
    start = before + 1 if count else before
    return str(start) if count == 1 else f"{start},{count}"


def patch(a, lines):
    done, at = [], 0
    for line in lines:
        hunk = re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@", line)
        if hunk:
            start = int(hunk[1]) - (hunk[2] != "0")
            if start < at or start > len(a):
                raise ValueError(f"{line} is not in its place")
            done += a[at:start]
            at = start
        elif line[:1] == "+":
            done.append(line[1:])
        elif line[:1] in (" ", "-") and line:
            if at >= len(a) or a[at] != line[1:]:
                raise ValueError(f"{line[1:]!r} is not there")
            done += [line[1:]] * (line[0] == " ")
            at += 1
        else:
            raise ValueError(f"{line!r} is no line of a hunk")
    return done + a[at:]


def _changes(base, other):
    """Regions of `base` and what is there in the other: (start, end, items)."""
    found, at, run = [], 0, None
    for kind, item in diff(base, other):
        if kind == "keep":
            run = None
        elif run is None:
            run = [at, at, []]
            found.append(run)
        if kind == "add":
            run[2].append(item)
        else:
            at += 1
            if kind == "remove":
                run[1] = at
    return found


def merge(base, ours, theirs):
    sides = [_changes(base, ours), _changes(base, theirs)]
    every = sorted((change[0], change[1]) for side in sides for change in side)
    regions = []
    for start, end in every:
        if regions and start <= regions[-1][1]:
            regions[-1][1] = max(regions[-1][1], end)
        else:
            regions.append([start, end])
    merged, conflicts, at = [], [], 0
    for start, end in regions:
        our, their = (_within(base, side, start, end) for side in sides)
        was = base[start:end]
        merged += base[at:start]
        if our != their and our != was and their != was:
            conflicts.append((was, our, their))
        merged += their if our == was else our
        at = end
    return merged + base[at:], conflicts


def _within(base, changes, start, end):
    found, at = [], start
    for first, last, items in changes:
        if start <= first and last <= end:
            found += base[at:first] + items
            at = last
    return found + base[at:end]
