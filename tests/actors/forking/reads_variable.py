import os

FOUND = os.environ.get("FORK_TEST_READ")
