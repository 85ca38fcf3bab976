"""Arrays of few distinct bit patterns as small codes and a sorted table: the search, without sorting the array."""

from __future__ import annotations

import numpy as np

__all__ = ["BLOCK", "MAX_CODES", "bit_view", "find_table", "spread_sample", "total_order"]

BLOCK = 1 << 15
"""Elements per step of a blockwise pass: all scratch of one step stays in a core's L2 cache."""

MAX_CODES = 1 << 16
"""Codes have at most 16 bits."""

_BYTE_CODES = 1 << 8
_SAMPLE = 1 << 16
_MIN_SLOT_BITS = 12
_MAX_SLOT_BITS = 18
_SLOTS_PER_PATTERN_BITS = 3
_MAX_LEVELS = 16
_TRIES = 4
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def bit_view(array: np.ndarray) -> np.ndarray:
    """Return the bits of a C-contiguous array as 1-D unsigned integers, without a copy."""
    return array.reshape(-1).view(np.dtype(f"u{array.dtype.itemsize}"))


def spread_sample(flat: np.ndarray, size: int) -> np.ndarray:
    """Return `size` elements from all over a 1-D array: one from each of `size` stretches, at a jittered place.

    A plain stride can be a multiple of the row length, and then sees one column of a volume only. The jitter is
    fixed, so that the same array gives the same codes in every run.
    """
    if flat.size <= size:
        return flat
    i = np.arange(size, dtype=np.uint64)
    jitter = (i * np.uint64(_GOLDEN) >> np.uint64(32)) * np.uint64(flat.size // size) >> np.uint64(32)
    picked: np.ndarray = flat.take((i * np.uint64(flat.size) // np.uint64(size) + jitter).astype(np.intp))
    return picked


def total_order(bits: np.ndarray) -> np.ndarray:
    """Return unsigned keys that sort floats, given by their bits, by value: IEEE 754's totalOrder.

    −NaN < −inf < … < −0.0 < 0.0 < … < inf < NaN; NaNs are ordered by payload. Every bit pattern has its own key.
    """
    word = bits.dtype.type
    sign = word(1 << (8 * bits.dtype.itemsize - 1))
    keys: np.ndarray = np.where(bits & sign, ~bits, bits | sign)
    return keys


def find_table(array: np.ndarray, max_entries: int = MAX_CODES) -> tuple[np.ndarray, np.ndarray] | None:
    """Find codes and a table such that ``table[codes]`` has every bit of the array.

    Parameters
    ----------
    array : numpy.ndarray
        C-contiguous floats of 2, 4 or 8 bytes, native byte order.
    max_entries : int
        Give up beyond as many distinct bit patterns.

    Returns
    -------
    tuple of numpy.ndarray or None
        uint8 or uint16 codes of the array's shape, and the 1-D table sorted by `total_order`, of which each entry is
        used. None if codes and table would not be clearly smaller than the array; then nothing is lost but the
        search, which a sample ends early for arrays of very many values.
    """
    bits = bit_view(array)
    limit = _entries_worth_it(bits, max_entries)
    if limit < 1:
        return None
    sample = spread_sample(bits, _SAMPLE)
    patterns, counts = np.unique(sample, return_counts=True)
    if patterns.size > limit or (sample.size < bits.size and _surely_more(counts, sample.size / bits.size, 2 * limit)):
        return None
    order = np.argsort(total_order(patterns))
    index = _PatternIndex(patterns[order], counts[order], limit)
    codes = index.encode(bits)
    if codes is None:
        return None
    table = index.patterns[: index.size]
    order = np.argsort(total_order(table))
    if index.size > patterns.size:
        # Neighbouring intensities get neighbouring codes: that compresses better than codes in order of appearance.
        ranks = np.empty(index.size, codes.dtype)
        ranks[order] = np.arange(index.size, dtype=codes.dtype)
        for start in range(0, codes.size, BLOCK):
            block = codes[start : start + BLOCK]
            block[...] = ranks.take(block)
    return codes.reshape(array.shape), table[order].view(array.dtype)


def _entries_worth_it(bits: np.ndarray, max_entries: int) -> int:
    """Return how many entries a table may have so that it and the codes take at most 3/4 of the array's bytes."""
    room = 3 * bits.nbytes // 4
    in_bytes = min(_BYTE_CODES, (room - bits.size) // bits.itemsize)
    in_words = min(MAX_CODES, (room - 2 * bits.size) // bits.itemsize)
    return min(max_entries, max(in_bytes, in_words))


def _surely_more(counts: np.ndarray, fraction: float, limit: int) -> bool:
    """Whether an array holds more than `limit` distinct patterns, judged by how often a sample of it saw each.

    Chao and Lin's estimate for a sample without replacement, a lower bound in expectation: at least
    once² / (2 · twice + once · fraction / (1 − fraction)) are unseen. `twice` is raised by four of its standard
    deviations and a constant, so that an array that just fits is practically never refused.
    """
    once = int(np.count_nonzero(counts == 1))
    twice = int(np.count_nonzero(counts == 2))  # noqa: PLR2004
    twice_at_most = twice + 4 * twice**0.5 + 8
    unseen = once**2 / (2 * twice_at_most + once * fraction / (1 - fraction))
    return bool(counts.size + unseen > limit)


class _Level:
    """One multiply-shift hash table without chains: each slot holds a pattern and its code.

    Slots not yet taken hold a pattern that exists, so that whatever a slot holds, equal bits mean the right code.
    """

    __slots__ = ("codes", "keys", "multiplier", "shift", "taken")

    def __init__(self, word: np.dtype, n_patterns: int, multiplier: int, filler: tuple[int, int]) -> None:
        width = 8 * word.itemsize
        wanted = max(_MIN_SLOT_BITS, n_patterns.bit_length() + _SLOTS_PER_PATTERN_BITS)
        slot_bits = min(wanted, _MAX_SLOT_BITS, width)
        self.multiplier = word.type(multiplier >> (64 - width) | 1)
        self.shift = word.type(width - slot_bits)
        self.keys = np.full(1 << slot_bits, filler[0], word)
        self.codes = np.full(1 << slot_bits, filler[1], np.uint16)
        self.taken = np.zeros(1 << slot_bits, np.bool_)

    def slots(self, patterns: np.ndarray) -> np.ndarray:
        slots: np.ndarray = (patterns * self.multiplier >> self.shift).astype(np.intp)
        return slots

    def insert(self, patterns: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Put patterns into free slots, the later the more surely; return which found no place."""
        slots = self.slots(patterns)
        free = ~self.taken[slots]
        self.keys[slots[free]] = patterns[free]
        placed = free & (self.keys[slots] == patterns)
        self.codes[slots[placed]] = codes[placed]
        self.taken[slots[placed]] = True
        left: np.ndarray = ~placed
        return left


class _PatternIndex:
    """Patterns seen so far and, by hashing, their codes: ranks of appearance.

    Perfect hashing is not required: patterns whose slot is taken go to a further, smaller level, so that each level
    has to look at a fraction of the elements only.
    """

    def __init__(self, patterns: np.ndarray, counts: np.ndarray, limit: int) -> None:
        self.size = patterns.size
        self.patterns = np.empty(limit, patterns.dtype)
        self.patterns[: self.size] = patterns
        self._counts = np.zeros(limit, np.intp)
        self._counts[: self.size] = counts
        self._built_for = 0
        self._levels: list[_Level] = []
        self._seed = 0

    def encode(self, bits: np.ndarray) -> np.ndarray | None:
        """Return the code of each element; None when there are too many patterns (or no hash separates them)."""
        codes = np.empty(bits.size, np.uint8 if self.size <= _BYTE_CODES else np.uint16)
        n = min(BLOCK, bits.size)
        hashed, seen = np.empty(n, bits.dtype), np.empty(n, bits.dtype)
        slots, differs = np.empty(n, np.intp), np.empty(n, np.bool_)
        if not self._build():
            return None
        for start in range(0, bits.size, n):
            block = bits[start : start + n]
            m = block.size
            if m < n:
                hashed, seen, slots, differs = hashed[:m], seen[:m], slots[:m], differs[:m]
            top = self._levels[0]
            np.multiply(block, top.multiplier, out=hashed)
            np.right_shift(hashed, top.shift, out=hashed)
            np.copyto(slots, hashed, casting="unsafe")
            np.take(top.keys, slots, mode="wrap", out=seen)
            np.not_equal(seen, block, out=differs)
            if differs.any():
                found = self._resolve(block, slots, differs)
                if found is None:
                    return None
                if self.size > _BYTE_CODES and codes.dtype == np.uint8:
                    codes = codes.astype(np.uint16)
                codes[start : start + m] = found
            else:
                codes[start : start + m] = top.codes.take(slots, mode="wrap")
        return codes

    def _resolve(self, block: np.ndarray, slots: np.ndarray, differs: np.ndarray) -> np.ndarray | None:
        """Return the codes of a block of which some elements are not in the slots of the first level."""
        codes: np.ndarray = self._levels[0].codes.take(slots, mode="wrap")
        rest = np.flatnonzero(differs)
        patterns = block[rest]
        for level in self._levels[1:]:
            slots = level.slots(patterns)
            found = level.keys[slots] == patterns
            codes[rest[found]] = level.codes[slots[found]]
            rest, patterns = rest[~found], patterns[~found]
            if not rest.size:
                return codes
        new, inverse = np.unique(patterns, return_inverse=True)
        if self.size + new.size > self.patterns.size:
            return None
        new_codes = np.arange(self.size, self.size + new.size, dtype=np.uint16)
        self.patterns[self.size : self.size + new.size] = new
        self.size += new.size
        codes[rest] = new_codes[inverse]
        # Rebuilt when it has filled up beyond what its levels were made for, so a few times at most.
        fits = self._insert(new, new_codes) if self.size <= 2 * self._built_for else self._build()
        return codes if fits else None

    def _build(self) -> bool:
        self._levels = []
        self._built_for = self.size
        # The most frequent last, so that they win the slots of the first level.
        by_count = np.argsort(self._counts[: self.size], kind="stable")
        return self._insert(self.patterns[by_count], by_count.astype(np.uint16))

    def _insert(self, patterns: np.ndarray, codes: np.ndarray) -> bool:
        for level in self._levels:
            left = level.insert(patterns, codes)
            patterns, codes = patterns[left], codes[left]
        while patterns.size:
            if len(self._levels) == _MAX_LEVELS:
                return False
            level, left = self._best_level(patterns, codes)
            self._levels.append(level)
            patterns, codes = patterns[left], codes[left]
        return True

    def _best_level(self, patterns: np.ndarray, codes: np.ndarray) -> tuple[_Level, np.ndarray]:
        """Return a level filled with the patterns under the best of a few multipliers, and which found no place."""
        best: tuple[int, _Level, np.ndarray] | None = None
        for _ in range(_TRIES):
            self._seed += 1
            level = _Level(patterns.dtype, patterns.size, _odd_number(self._seed), (int(self.patterns[0]), 0))
            left = level.insert(patterns, codes)
            missed = int(self._counts[codes[left]].sum())
            if best is None or missed < best[0]:
                best = missed, level, left
            if not missed:
                break
        assert best is not None  # noqa: S101
        return best[1], best[2]


def _odd_number(seed: int) -> int:
    """Return the seed-th of a fixed series of well-mixed odd 64-bit numbers (splitmix64)."""
    z = seed * _GOLDEN & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31 | 1
