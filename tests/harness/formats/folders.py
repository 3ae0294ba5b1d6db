"""One whole folder of each format, as files by name."""

from pathlib import Path

HARBOR = {
    "task.toml": """
schema_version = "1.1"

[task]
name = "us/greet"

[metadata]
difficulty = "easy"

[agent]
timeout_sec = 90.0

[verifier]
timeout_sec = 60
env = { WANTED = "hello" }

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage = "1G"
allow_internet = false
""",
    "instruction.md": "Write hello into greeting.txt.\n",
    "environment/Dockerfile": """
# The image of the task.
FROM python:3.12-slim
ARG UNUSED=1
ENV MODE=fast LANGUAGE="en us"
WORKDIR /app
COPY given.txt \\
     notes.txt ./
COPY --chown=1000:1000 data /app/data
RUN mkdir -p out/deep
CMD ["bash"]
""",
    "environment/given.txt": "given\n",
    "environment/notes.txt": "notes\n",
    "environment/data/a.csv": "1\n",
    "tests/test.sh": """#!/bin/bash
test "$MODE" = fast || exit 3
test "$(pwd)" = /app || exit 4
if [ "$(cat greeting.txt)" = "$WANTED" ]; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt
""",
    "solution/solve.sh": "echo hello > /app/greeting.txt\n",
}

TERMINAL_BENCH = {
    "task.yaml": """instruction: |-
  Write hello into greeting.txt.
author_email: someone@example.com
difficulty: easy
tags:
  - file
parser_name: pytest
max_agent_timeout_sec: 120
max_test_timeout_sec: 65.0
run_tests_in_same_shell: false
""",
    "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624\nWORKDIR /app\n",
    "docker-compose.yaml": """services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
""",
    "run-tests.sh": '#!/bin/bash\npython3 -m pytest "$TEST_DIR/test_outputs.py" -rA\n',
    "tests/test_outputs.py": """from pathlib import Path

def test_is_there():
    assert Path("/app/greeting.txt").exists()

def test_says_hello():
    assert Path("/app/greeting.txt").read_text().strip() == "hello"
""",
    "solution.sh": "echo hello > /app/greeting.txt\n",
}

NL2REPOBENCH = {
    "start.md": "# greeter\n\nA package `greeter` with `greet(name)`, which returns `hello NAME`.\n",
    "test_commands.json": '["pip install -e .", "pytest tests greeter/tests"]',
    "test_files.json": '["tests/test_greet.py", "greeter/tests"]',
    "test_case_count.txt": "2\n",
    "upstream/tests/test_greet.py": """from greeter import greet

def test_greet():
    assert greet('x') == 'hello x'
""",
    "upstream/greeter/tests/__init__.py": "NAME = 'y'\n",
    "upstream/greeter/tests/test_more.py": """from greeter import greet
from greeter.tests import NAME

def test_other():
    assert greet(NAME) == 'hello y'
""",
}

OURS = {
    "prompt.md": "Write hello into greeting.txt.\n",
    "workspace/given.txt": "given\n",
    "tests/test_it.py": "def test_it():\n    assert open('greeting.txt').read() == 'hello\\n'\n",
}

FORMATS = {"gyre": OURS, "harbor": HARBOR, "terminal-bench": TERMINAL_BENCH, "nl2repobench": NL2REPOBENCH}


def write(folder: Path, files: dict[str, str], **changed: str) -> Path:
    for name, text in {**files, **changed}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
