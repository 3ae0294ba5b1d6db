import functools
import time
from collections import OrderedDict

_NONE = object()


class LRUCache:
    def __init__(self, capacity, ttl=None, clock=time.monotonic):
        if capacity < 1:
            raise ValueError(f"a capacity of {capacity} holds nothing")
        self._capacity = capacity
        self._ttl = ttl
        self._clock = clock
        self._items = OrderedDict()
        self.hits = 0
        self.misses = 0

    def put(self, key, value, ttl=_NONE):
        ttl = self._ttl if ttl is _NONE else ttl
        self._items[key] = (value, None if ttl is None else self._clock() + ttl)
        self._items.move_to_end(key)
        if len(self._items) > self._capacity:
            self.purge()
        while len(self._items) > self._capacity:
            self._items.popitem(last=False)

    def get(self, key, default=None):
        value = self.peek(key, _NONE)
        if value is _NONE:
            self.misses += 1
            return default
        self.hits += 1
        self._items.move_to_end(key)
        return value

    def peek(self, key, default=None):
        if key not in self:
            return default
        return self._items[key][0]

    def pop(self, key):
        if key not in self:
            raise KeyError(key)
        return self._items.pop(key)[0]

    def purge(self):
        over = [key for key in self._items if self._is_over(key)]
        for key in over:
            del self._items[key]
        return len(over)

    def memoize(self, function):
        me = object()

        @functools.wraps(function)
        def kept(*args, **kwargs):
            key = (me, args, tuple(sorted(kwargs.items())))
            value = self.get(key, _NONE)
            if value is _NONE:
                value = function(*args, **kwargs)
                self.put(key, value)
            return value

        return kept

    def __contains__(self, key):
        if key in self._items and self._is_over(key):
            del self._items[key]
        return key in self._items

    def __len__(self):
        self.purge()
        return len(self._items)

    def __iter__(self):
        self.purge()
        return iter(list(reversed(self._items)))

    def _is_over(self, key):
        until = self._items[key][1]
        return until is not None and self._clock() >= until
