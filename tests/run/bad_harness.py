"""A harness that misbehaves as its task's name says. Standard library only; `python -I -S bad_harness.py`.

What it leaves is `result.json`, with the score that the evaluator is to give, and what it has seen. An answer
that it does not get, or an error that it cannot read, costs it that score.
"""

import http.client
import json
import os
import signal
import sys
import time

TASK, EXECUTION = os.environ["GYRE_TASK"], os.environ["GYRE_EXECUTION"]
INDEX = int(EXECUTION.rpartition(".")[2])


class Client:
    def __init__(self):
        address, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
        self.path = f"/{path}/chat/completions"
        self.connection = http.client.HTTPConnection(address)

    def send(self, body, **headers):
        headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        self.connection.request("POST", self.path, body, headers)

    def post(self, body):
        self.send(body)
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def ask(self, *texts, **fields):
        """A conversation of the user's `texts`, with an answer to each but the last."""
        return self.post(request(texts, **fields))


def request(texts, **fields):
    messages = []
    for text in texts:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "done"}]
    return json.dumps({"model": "policy", "messages": messages[:-1], "max_tokens": 4, **fields}).encode()


def leave(score, **seen):
    with open("result.json", "w") as file:
        json.dump({"execution": EXECUTION, "score": score, "seen": seen}, file)


def works(client):
    """Two turns of a conversation. Scores differ within the group, so that there is something to learn."""
    seen = [client.ask("tidy"), client.ask("tidy", "next")]
    well = all(status == 200 and answer["usage"]["completion_tokens"] > 0 for status, answer in seen)
    leave(0.5 + 0.25 * (INDEX % 2) if well else 0.0, seen=seen)


def exits_at_once(client):
    sys.exit(3)


def hangs(client):
    status, _ = client.ask("tidy")
    leave(0.25 if status == 200 else 0.0)
    time.sleep(1000)


def kills_itself(client):
    leave(0.25)
    os.kill(os.getpid(), signal.SIGKILL)


def prints_garbage(client):
    for stream in (sys.stdout.buffer, sys.stderr.buffer):
        for _ in range(16):
            stream.write(os.urandom(1 << 16))
    works(client)


def hangs_up(client):
    """Closes its connection in the middle of an answer and of a request, before an answer, and goes on."""
    client.send(request(["tidy"], stream=True))
    client.connection.sock.recv(1)
    client.connection.close()
    client.send(b'{"messages', **{"Content-Length": "100"})
    client.connection.close()
    client.send(request(["tidy"]))
    client.connection.close()
    works(client)


def sends_nonsense(client):
    bodies = (b"", b"\xff\xfe garbage", b'{"messages": [', b"[" * 100_000, b'{"messages": 7}', b"null")
    seen = [client.post(body) for body in bodies]
    refused = all(status == 400 and answer["error"]["type"] for status, answer in seen)
    if refused:
        works(client)
    else:
        leave(0.0, seen=seen)


def prompts_too_long(client):
    """Reads the error as harnesses do, compacts, goes on."""
    status, answer = client.ask("tidy " * 2000)
    error = answer.get("error", {})
    understood = (
        status == 400
        and error.get("code") == "context_length_exceeded"
        and error.get("type") == "invalid_request_error"
        and "prompt is too long" in error.get("message", "")
    )
    if understood:
        works(client)
    else:
        leave(0.0, seen=[status, answer])


if __name__ == "__main__":
    # What begins with `evaluator` is the evaluator's matter.
    globals().get(TASK, works)(Client())
