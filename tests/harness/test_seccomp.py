import struct

import pytest

from gyre.harness.seccomp import STEP_BYTES, open_to_looks, program


def ends(code: bytes, number: int, architecture: int, argument: int = 0, second: int = 0) -> int:
    """What a kernel that runs the program answers."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, argument, second, 0, 0, 0, 0)
    steps = list(struct.iter_unpack("=HBBI", code))
    at = value = 0
    while True:
        kind, if_so, if_not, k = steps[at]
        at += 1
        if kind == 0x20:
            value = struct.unpack_from("=I", data, k)[0]
        elif kind == 0x06:
            return int(k)
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[kind]
            at += if_so if holds else if_not


ALLOW, NO_FAMILY, NO_CALL, FORBIDDEN = 0x7FFF0000, 0x00050061, 0x00050026, 0x00050001
NEW_USER = 0x10000000


@pytest.mark.parametrize(
    ("machine", "architecture", "number"), [("x86_64", 0xC000003E, 41), ("aarch64", 0xC00000B7, 198)]
)
def test_other_families_of_sockets_are_refused(machine: str, architecture: int, number: int) -> None:
    code = program(machine)
    assert code is not None
    found = {family: ends(code, number, architecture, family) for family in range(64)}
    assert [family for family, said in found.items() if said == ALLOW] == [1, 2, 10, 16]
    assert set(found.values()) == {ALLOW, NO_FAMILY}
    # The kernel looks at 32 bits of a family.
    assert ends(code, number, architecture, 40 | 1 << 32) == NO_FAMILY
    assert ends(code, number + 1, architecture, 40) == ALLOW
    assert ends(code, 425, architecture) == NO_CALL
    assert ends(code, number | 0x40000000, architecture, 1) == NO_CALL
    assert ends(code, number, 0x40000003, 1) == NO_CALL


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [("x86_64", 0xC000003E, (56, 272)), ("aarch64", 0xC00000B7, (220, 97))],
)
def test_user_namespaces_are_refused(machine: str, architecture: int, calls: tuple[int, ...]) -> None:
    code = program(machine)
    assert code is not None
    for call in calls:
        assert ends(code, call, architecture, NEW_USER | 0x20000) == FORBIDDEN
        assert ends(code, call, architecture, 0x01200011) == ALLOW
    assert ends(code, 435, architecture) == NO_CALL
    assert ends(code, calls[0] + 1, architecture, NEW_USER) == ALLOW


@pytest.mark.parametrize(
    ("machine", "architecture", "prctl"), [("x86_64", 0xC000003E, 157), ("aarch64", 0xC00000B7, 167)]
)
def test_to_hide_is_done_without_effect(machine: str, architecture: int, prctl: int) -> None:
    code = open_to_looks(machine)
    assert code is not None and len(code) % STEP_BYTES == 0
    found = {option: ends(code, prctl, architecture, option) for option in range(80)}
    assert [option for option, said in found.items() if said != ALLOW] == [4]
    assert found[4] == 0x00050000
    assert ends(code, prctl, architecture, 4 | 1 << 32) == found[4]
    assert ends(code, prctl + 1, architecture, 4) == ALLOW


@pytest.mark.parametrize(
    ("machine", "architecture", "calls", "priorities"),
    [
        ("x86_64", 0xC000003E, (302, 142, 144, 203, 314), (141, 251)),
        ("aarch64", 0xC00000B7, (261, 118, 119, 122, 274), (140, 30)),
    ],
)
def test_the_first_process_keeps_its_limits_and_its_turns(
    machine: str, architecture: int, calls: tuple[int, ...], priorities: tuple[int, ...]
) -> None:
    code = program(machine)
    assert code is not None
    for call in calls:
        found = {pid: ends(code, call, architecture, pid) for pid in (0, 1, 2, 1 | 1 << 32)}
        assert found == {0: ALLOW, 1: FORBIDDEN, 2: ALLOW, 1 | 1 << 32: FORBIDDEN}
    for call in priorities:
        found = {of: [ends(code, call, architecture, of, who) for who in (0, 1, 2)] for of in (0, 1, 2, 3)}
        one, many = [ALLOW, FORBIDDEN, ALLOW], [FORBIDDEN] * 3
        assert found == {0: one, 1: one, 2: many, 3: many}


def test_other_machines_have_no_filter() -> None:
    assert program("riscv64") is None
    assert open_to_looks("riscv64") is None
