"""What happens to bytes: the damage that disks, networks and copies do, and the changes that somebody makes."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Dice(Protocol):
    """Where choices come from: a seeded generator, or the bytes that a fuzzer evolves."""

    def below(self, n: int) -> int:
        """An integer from 0 to n − 1."""

    def noise(self, n: int) -> bytes:
        """Any n bytes."""


class SeededDice:
    """The same choices for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, n: int) -> int:
        return self._random.randrange(n)

    def noise(self, n: int) -> bytes:
        return self._random.randbytes(n)


def one_of(dice: Dice, options: list[T] | tuple[T, ...]) -> T:
    return options[dice.below(len(options))]


# --- Damage: of any file ---------------------------------------------------------------------------------------------


def flipped_bit(data: bytearray, dice: Dice) -> None:
    data[dice.below(len(data))] ^= 1 << dice.below(8)


def flipped_bits(data: bytearray, dice: Dice) -> None:
    for _ in range(2 + dice.below(30)):
        flipped_bit(data, dice)


def changed_byte(data: bytearray, dice: Dice) -> None:
    data[dice.below(len(data))] = dice.below(256)


def burst(data: bytearray, dice: Dice) -> None:
    """A run of noise, as of a bad cable or a bad cell."""
    start = dice.below(len(data))
    run = min(1 + dice.below(64), len(data) - start)
    data[start : start + run] = dice.noise(run)


def zeroed_sector(data: bytearray, dice: Dice) -> None:
    size = one_of(dice, (16, 512, 4096))
    start = dice.below(len(data)) // size * size
    end = min(start + size, len(data))
    data[start:end] = bytes(end - start)


def zeroed_tail(data: bytearray, dice: Dice) -> None:
    """What a crash leaves of a file whose size was written before its contents."""
    start = dice.below(len(data))
    data[start:] = bytes(len(data) - start)


def truncated(data: bytearray, dice: Dice) -> None:
    del data[dice.below(len(data)) :]


def extended(data: bytearray, dice: Dice) -> None:
    data += dice.noise(1 + dice.below(40))


def lost_bytes(data: bytearray, dice: Dice) -> None:
    start = dice.below(len(data))
    del data[start : start + 1 + dice.below(16)]


def repeated_bytes(data: bytearray, dice: Dice) -> None:
    start = dice.below(len(data))
    data[start:start] = data[start : start + 1 + dice.below(64)]


def swapped_blocks(data: bytearray, dice: Dice) -> None:
    size = one_of(dice, (4, 16, 512))
    a, b = dice.below(len(data)) // size * size, dice.below(len(data)) // size * size
    first, second = bytes(data[a : a + size]), bytes(data[b : b + size])
    data[a : a + len(second)] = second[: len(data) - a]
    data[b : b + len(first)] = first[: len(data) - b]


DAMAGES: tuple[Callable[[bytearray, Dice], None], ...] = (
    flipped_bit, flipped_bits, changed_byte, burst, zeroed_sector, zeroed_tail,
    truncated, extended, lost_bytes, repeated_bytes, swapped_blocks,
)  # fmt: skip


def damaged(data: bytes, dice: Dice) -> bytes:
    """The same file after an accident; sometimes it is luckily the same."""
    broken = bytearray(data)
    one_of(dice, DAMAGES)(broken, dice)
    return bytes(broken)


# --- Changes to JSON that know what they change -----------------------------------------------------------------------

SCALARS: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 64, 255, 256, 65535, 65536, 2**31, 2**32 - 1, 2**53, 2**62, 2**63, 2**64, 10**30,
    -(2**63), 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "0", "-1", "../x", "/etc/passwd", "image", "|u1",
    "<f4", "<f8", "|b1", "|S0", "<U0", "<U1", "<M8[s]", "|O", "V8", "uint8", "float32", "table", "affine", "identity",
    "AAAA", "AAAAAA==", "0x1p1000", "nan", "ffffffff", "cpu", "meta", "cuda:0", "\x1b[31m", "\x00", "\ud800",
)  # fmt: skip
TAGS = (
    "$tuple", "$set", "$frozenset", "$dict", "$ordereddict", "$int", "$float", "$complex", "$bytes", "$bytearray",
    "$range", "$slice", "$path", "$ellipsis", "$ndarray", "$npscalar", "$nptype", "$dtype", "$enum", "$tensor",
    "$metatensor", "$torch.size", "$torch.dtype", "$torch.device", "$reduce", "$import",
)  # fmt: skip


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, as the steps that lead to it."""
    yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for step, child in children:
        yield from places(child, (*path, step))


def made_up_tree(dice: Dice, depth: int = 0) -> Any:
    """A payload tree of known tags around bodies that need not suit them."""
    kind = dice.below(8 if depth < 4 else 3)
    if kind < 3:
        return one_of(dice, SCALARS)
    if kind == 3:
        return [made_up_tree(dice, depth + 1) for _ in range(dice.below(4))]
    if kind == 4:
        return {
            one_of(dice, ("a", "shape", "dtype", "data", "meta", "$x")): made_up_tree(dice, depth + 1)
            for _ in range(dice.below(4))
        }
    tag = one_of(dice, TAGS)
    if tag in ("$ndarray", "$npscalar"):
        return {tag: made_up_array(dice)}
    if tag in ("$tensor", "$metatensor"):
        node = {"data": made_up_array(dice), "meta": made_up_tree(dice, depth + 1), "is_batch": dice.below(2)}
        node["applied_operations"] = made_up_tree(dice, depth + 1)
        if dice.below(3) == 0:
            node["dtype"] = one_of(dice, ("bfloat16", "float8_e5m2", "bool", "float32", "qint8", "x"))
        return {tag: node}
    return {tag: made_up_tree(dice, depth + 1)}


def made_up_array(dice: Dice) -> Any:
    node = {
        "dtype": one_of(dice, ("<f4", "|u1", "<i8", "|b1", "<U1", "|S0", ">f4", "<M8[s]", "f4,f4", "|O", "x")),
        "shape": [one_of(dice, (0, 1, 2, 3, 7, 2**20, 2**40, 2**63, -1)) for _ in range(dice.below(4))],
    }
    if dice.below(2):
        return {**node, "base64": one_of(dice, ("", "AAAA", "AAAAAA==", "AAAAAAAAAAA=", "!", "AQID" * 7))}
    return {**node, "array": one_of(dice, ("noise", "label", "x", "../noise"))}


def changed_document(document: Any, dice: Dice) -> Any:
    """A copy with a few places changed."""
    changed = copy.deepcopy(document)
    for _ in range(1 + dice.below(3)):
        every = [p for p in places(changed) if p and p[:3] != ("attributes", "zcache", "crc32c")]
        if not every:
            break
        *lead, last = one_of(dice, every)
        node = changed
        for step in lead:
            node = node[step]
        match dice.below(6):
            case 0:
                del node[last]
            case 1:
                node[last] = made_up_tree(dice)
            case 2 if type(node[last]) is int:
                node[last] += one_of(dice, (-1, 1, 8, 2**16, 2**32))
            case 3 if isinstance(node, dict):
                node[one_of(dice, (*TAGS, "x", "shape"))] = node[last]
            case 4 if isinstance(node[last], list):
                node[last] = node[last] * dice.below(4)
            case _:
                node[last] = one_of(dice, SCALARS)
    return changed


def changed_text(data: bytes, keep: int, dice: Dice) -> bytes:
    """JSON with its text damaged behind the first bytes, so that it may be no JSON at all."""
    return data[:keep] + damaged(data[keep:], dice)


# --- Changes to chunks and their index --------------------------------------------------------------------------------

_LENGTHS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 2**15, 2**16, 2**20, 2**24, 2**31 - 17, 2**31 - 1, 2**31, 2**32 - 1)


def changed_stream(stream: bytes, dice: Dice, *, plausible: bool) -> bytes:
    """A Blosc stream with its header, its table of blocks or its data changed.

    With `plausible`, sizes are those that are expected, so that the decoder itself is reached.
    """
    changed = bytearray(stream)
    for _ in range(1 + dice.below(4)):
        where = dice.below(6)
        if where == 0:
            changed[dice.below(4)] = dice.below(256)
        elif where == 1:
            start = one_of(dice, (4, 8, 12))
            changed[start : start + 4] = struct.pack("<I", one_of(dice, (*_LENGTHS, len(stream))))
        elif where == 2 and len(changed) > 20:  # the starts of blocks, and the lengths of their streams
            start = 16 + dice.below(min(len(changed) - 19, 64))
            changed[start : start + 4] = struct.pack("<I", one_of(dice, (*_LENGTHS, len(stream), dice.below(2**32))))
        elif where == 3 and len(changed) > 17:
            changed[16:] = damaged(bytes(changed[16:]), dice)
        elif len(changed) > 16:
            changed[16 + dice.below(len(changed) - 16)] ^= 1 << dice.below(8)
    if plausible and len(changed) >= 16:
        changed[:2] = stream[:2]
        changed[3:8] = stream[3:8]
        changed[12:16] = struct.pack("<I", len(changed))
    return bytes(changed)


def changed_places(table: Any, shard_nbytes: int, dice: Dice) -> Any:
    """An index with a few of its numbers changed."""
    changed = table.copy()
    numbers = (0, 1, 19, 20, 21, shard_nbytes, shard_nbytes - 1, 2**31, 2**32, 2**63, 2**64 - 1, 2**64 - 21)
    for _ in range(1 + dice.below(3)):
        changed[dice.below(len(changed)), dice.below(2)] = one_of(dice, numbers)
    if dice.below(3) == 0:
        changed[dice.below(len(changed))] = changed[dice.below(len(changed))]
    return changed


def as_text(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
