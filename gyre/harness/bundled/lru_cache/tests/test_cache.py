import pytest
from cache import LRUCache


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_put_and_get():
    cache = LRUCache(2)
    cache.put("a", 1)
    assert cache.get("a") == 1
    assert cache.get("b") is None
    assert cache.get("b", 7) == 7


def test_a_value_may_be_none():
    cache = LRUCache(2)
    cache.put("a", None)
    assert cache.get("a", 7) is None
    assert "a" in cache


def test_the_one_not_used_for_longest_goes():
    cache = LRUCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.put("c", 3)
    assert list(cache) == ["c", "b"]


def test_get_is_a_use():
    cache = LRUCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.get("a")
    cache.put("c", 3)
    assert list(cache) == ["c", "a"]


def test_peek_is_no_use():
    cache = LRUCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.peek("a") == 1
    assert cache.peek("x", 5) == 5
    cache.put("c", 3)
    assert list(cache) == ["c", "b"]


def test_a_key_that_is_put_again():
    cache = LRUCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.put("a", 3)
    assert len(cache) == 2
    cache.put("c", 4)
    assert list(cache) == ["c", "a"]
    assert cache.get("a") == 3


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_of_nothing(capacity):
    with pytest.raises(ValueError):
        LRUCache(capacity)


def test_items_end(clock):
    cache = LRUCache(3, ttl=10, clock=clock)
    cache.put("a", 1)
    clock.now += 9.9
    assert cache.get("a") == 1
    clock.now += 0.1
    assert cache.get("a") is None
    assert "a" not in cache
    assert len(cache) == 0


def test_a_use_does_not_prolong(clock):
    cache = LRUCache(3, ttl=10, clock=clock)
    cache.put("a", 1)
    clock.now += 6
    cache.get("a")
    clock.now += 6
    assert cache.peek("a") is None


def test_a_put_prolongs(clock):
    cache = LRUCache(3, ttl=10, clock=clock)
    cache.put("a", 1)
    clock.now += 6
    cache.put("a", 2)
    clock.now += 6
    assert cache.get("a") == 2


def test_an_item_with_a_time_of_its_own(clock):
    cache = LRUCache(3, ttl=10, clock=clock)
    cache.put("a", 1, ttl=2)
    cache.put("b", 2, ttl=None)
    clock.now += 3
    assert list(cache) == ["b"]
    clock.now += 1000
    assert list(cache) == ["b"]


def test_what_is_over_goes_first(clock):
    cache = LRUCache(2, clock=clock)
    cache.put("old", 1)
    cache.put("short", 2, ttl=1)
    clock.now += 2
    cache.put("new", 3)
    assert sorted(cache) == ["new", "old"]


def test_pop(clock):
    cache = LRUCache(2, ttl=1, clock=clock)
    cache.put("a", 1)
    assert cache.pop("a") == 1
    with pytest.raises(KeyError):
        cache.pop("a")
    cache.put("b", 1)
    clock.now += 2
    with pytest.raises(KeyError):
        cache.pop("b")


def test_hits_and_misses(clock):
    cache = LRUCache(2, ttl=1, clock=clock)
    cache.put("a", 1)
    cache.get("a")
    cache.get("b")
    cache.peek("a")
    assert "a" in cache
    clock.now += 2
    cache.get("a")
    assert (cache.hits, cache.misses) == (1, 2)


def test_purge(clock):
    cache = LRUCache(5, ttl=1, clock=clock)
    for key in "abc":
        cache.put(key, key)
    cache.put("d", 1, ttl=None)
    assert cache.purge() == 0
    clock.now += 1
    assert cache.purge() == 3
    assert list(cache) == ["d"]


def test_memoize():
    cache, calls = LRUCache(10), []

    @cache.memoize
    def add(a, b=0, c=0):
        calls.append((a, b, c))
        return a + b + c

    assert [add(1), add(1), add(1, b=2, c=3), add(1, c=3, b=2)] == [1, 1, 6, 6]
    assert len(calls) == 2


def test_memoize_of_two_functions():
    cache = LRUCache(10)
    one, two = cache.memoize(lambda x: ("one", x)), cache.memoize(lambda x: ("two", x))
    assert (one(1), two(1), one(1)) == (("one", 1), ("two", 1), ("one", 1))


def test_memoize_keeps_no_errors():
    cache, calls = LRUCache(10), []

    @cache.memoize
    def fail(x):
        calls.append(x)
        raise RuntimeError(x)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            fail(1)
    assert calls == [1, 1]


def test_memoize_of_none():
    cache, calls = LRUCache(10), []
    nothing = cache.memoize(calls.append)
    nothing(1)
    nothing(1)
    assert calls == [1]
