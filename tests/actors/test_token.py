from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.actors.token import LONGEST, SHORTEST, TokenError, make_token, read_token


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_new_token_is_long_and_only_for_this_user(tmp_path: Path) -> None:
    path = tmp_path / "run" / "token"
    token = make_token(path)
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == token
    assert make_token(tmp_path / "other") != token


def test_a_token_that_is_there_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "token", b"k" * 40 + b"\n")
    assert make_token(path) == b"k" * 40


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_one_that_others_may_read_is_refused_with_the_fix(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "token", b"k" * 64, mode)
    for use in (read_token, make_token):
        with pytest.raises(TokenError, match=f"chmod 600 {path}"):
            use(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match="cannot be read: No such file"):
        read_token(tmp_path / "none")
    with pytest.raises(TokenError, match="cannot be"):
        read_token(tmp_path)
    with pytest.raises(TokenError, match="Not a directory"):
        make_token(write(tmp_path / "file", b"") / "token")
    with pytest.raises(TokenError):
        read_token(tmp_path / "nul\0")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(TokenError, match="no regular file"):
        read_token(tmp_path / "pipe")


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(content=st.binary(max_size=LONGEST + 100))
def test_any_content_is_a_token_or_an_error(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "token", content)
    try:
        token = read_token(path)
    except TokenError:
        assert not SHORTEST <= len(content.strip()) <= LONGEST or len(content) > LONGEST
    else:
        assert token == content.strip() and SHORTEST <= len(token) <= LONGEST
