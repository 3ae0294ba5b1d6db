import asyncio
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gyre.harness.output import Output, OutputReader


def test_a_short_output_is_logged_once(tmp_path: Path) -> None:
    output = Output(tmp_path / "log")
    output.feed(b"one\n")
    assert (tmp_path / "log").read_bytes() == b"one\n"
    output.feed(b"two\n")
    output.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    assert output.tail() == "one\ntwo\n"


def test_a_log_goes_on_where_an_earlier_attempt_ended(tmp_path: Path) -> None:
    for text in (b"first\n", b"second\n"):
        output = Output(tmp_path / "log")
        output.feed(text)
        output.close()
    assert (tmp_path / "log").read_bytes() == b"first\nsecond\n"


def test_of_a_long_output_beginning_and_end_are_logged(tmp_path: Path) -> None:
    output = Output(tmp_path / "log", head_bytes=4, tail_bytes=3)
    output.feed(b"0123456789")
    output.close()
    assert (tmp_path / "log").read_bytes() == b"0123\n[3 bytes left out]\n789"


@given(st.lists(st.binary(max_size=30)), st.integers(0, 40), st.integers(1, 40))
def test_nothing_is_lost_unless_it_is_said(chunks: list[bytes], head: int, tail: int) -> None:
    read, write = os.pipe()
    try:
        output = Output(Path(f"/proc/self/fd/{write}"), head, tail)
        for chunk in chunks:
            output.feed(chunk)
        output.close()
        os.close(write)
        log = b"".join(iter(lambda: os.read(read, 65536), b""))
    finally:
        os.close(read)
    whole = b"".join(chunks)
    if len(whole) <= head + tail:
        assert log == whole
    else:
        lost = len(whole) - head - tail
        assert log == whole[:head] + f"\n[{lost} bytes left out]\n".encode() + whole[-tail:]


def test_a_full_disk_is_no_error() -> None:
    output = Output(Path("/dev/full"))
    output.feed(b"text")
    output.close()
    assert output.tail() == "text"


async def test_what_is_in_the_pipe_at_the_end_is_read(tmp_path: Path) -> None:
    read, write = os.pipe()
    output = Output(tmp_path / "log")
    reader = OutputReader(read, output)
    os.write(write, b"x" * 60000)
    reader.close()
    os.close(write)
    assert (tmp_path / "log").stat().st_size == 60000


async def test_a_pipe_that_ends_is_waited_for_no_longer(tmp_path: Path) -> None:
    read, write = os.pipe()
    output = Output()
    reader = OutputReader(read, output)
    os.write(write, b"end")
    os.close(write)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not asyncio.get_running_loop().remove_reader(read)
    reader.close()
    assert output.tail() == "end"
