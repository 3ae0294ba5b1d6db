import re
import sys
from collections import Counter


def words(text):
    runs = re.findall(r"(?:[^\W_]|')+", text.lower())
    return [run for run in runs if run.strip("'")]


def count(text):
    return dict(Counter(words(text)))


def top(text, n):
    return sorted(count(text).items(), key=lambda pair: (-pair[1], pair[0]))[:n]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        for word, times in top(file.read(), 10):
            print(times, word)
