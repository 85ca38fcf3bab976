"""`make fuzz`: mutate an entry for FUZZ_S seconds, guided by the coverage of zcache's code if atheris is installed.

The readings run in a process of their own; this one counts how it ends, starts the next, and prints the figures:

    FUZZ_S=3600 make fuzz
    python -m tests.hostile.fuzz_entry 60

Exit status 1 if anything crashed, hung, or was read wrong. The bytes that led to it are kept in FUZZ_DIR.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.mutations import Dice, SeededDice

REPOSITORY = Path(__file__).parents[2]
HUNG_S = 20
MEMORY_MB = 4096
_FIELDS = ("damage", "forgeries", "right", "miss", "other", "healed", "wrong")
_CHILD = "--read"
_TIMEOUT_STATUS = 70  # libFuzzer's own


class Board:
    """Counters in a file that both processes map: what was counted outlives whoever counted."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(_FIELDS)))
        with path.open("r+b") as f:
            self._map = mmap.mmap(f.fileno(), 0)

    def add(self, field: str) -> None:
        offset = 8 * _FIELDS.index(field)
        (n,) = struct.unpack_from("<Q", self._map, offset)
        struct.pack_into("<Q", self._map, offset, n + 1)

    def read(self) -> dict[str, int]:
        return dict(zip(_FIELDS, struct.unpack_from(f"<{len(_FIELDS)}Q", self._map), strict=True))

    def tried(self) -> int:
        counts = self.read()
        return counts["damage"] + counts["forgeries"]


# --- The process that reads -------------------------------------------------------------------------------------------


class FuzzedDice:
    """Choices made by the bytes of the fuzzer; a generator seeded with them goes on where they end."""

    def __init__(self, provider, seed: int) -> None:
        self._provider = provider
        self._rest = SeededDice(seed)

    def below(self, n: int) -> int:
        return self._provider.ConsumeIntInRange(0, n - 1) if self._provider.remaining_bytes() else self._rest.below(n)

    def noise(self, n: int) -> bytes:
        data = self._provider.ConsumeBytes(n)
        return data + self._rest.noise(n - len(data))


def one(t, trial, board: Board, dice: Dice) -> None:
    """One mutation, one reading, one verdict; `t` is the module of trials."""
    attack = (*t.DAMAGE, *t.FORGERIES)[dice.below(len(t.FORGERIES) + 1)]
    board.add("damage" if attack in t.DAMAGE else "forgeries")
    try:
        outcome = t.attempt(trial, attack, dice)
        board.add({t.Outcome.RIGHT: "right", t.Outcome.MISS: "miss", t.Outcome.OTHER: "other"}[outcome])
        if outcome is t.Outcome.MISS and board.tried() % 50 == 0:
            trial.assert_healed()
            trial.adopt()
            board.add("healed")
    except t.WrongReadError:
        board.add("wrong")
        raise


def read_guided(folder: Path, seconds: int, seed: int) -> None:
    """Read what the fuzzer makes up, until the time is over or something breaks."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["zcache"]):
        t = importlib.import_module("tests.hostile.trial")
    board, trial = Board(folder / "board"), t.Trial(folder / "cache")

    def test(data: bytes) -> None:
        one(t, trial, board, FuzzedDice(atheris.FuzzedDataProvider(data), len(data)))

    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-timeout={HUNG_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-artifact_prefix={folder}/",
        "-max_len=400",
        "-verbosity=0",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], test)
    atheris.Fuzz()


def read_seeded(folder: Path, seconds: int, seed: int) -> None:
    """The same without atheris: mutations by chance."""
    t = importlib.import_module("tests.hostile.trial")
    board, trial = Board(folder / "board"), t.Trial(folder / "cache")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seed += 1
        (folder / "seed").write_text(str(seed))
        one(t, trial, board, SeededDice(seed))


# --- The process that counts ------------------------------------------------------------------------------------------


@dataclass
class Ends:
    """How the reading processes ended before their time was over."""

    crashes: int = 0
    hangs: int = 0


def supervise(folder: Path, seconds: int) -> Ends:
    """Keep a reading process running until the time is over."""
    ends, board, end = Ends(), Board(folder / "board"), time.monotonic() + seconds
    while (left := round(end - time.monotonic())) > 0:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        tried = board.tried()
        wrong = board.read()["wrong"]
        command = [sys.executable, "-m", "tests.hostile.fuzz_entry", _CHILD, str(folder), str(left), str(tried + 1)]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
            if hung(process, board):
                process.kill()
                process.wait()
                ends.hangs += 1
            elif process.returncode == _TIMEOUT_STATUS:
                ends.hangs += 1
            elif process.returncode and board.read()["wrong"] == wrong:
                ends.crashes += 1
        if board.tried() == tried:
            raise SystemExit(f"the reading process cannot start:\n{(folder / 'log').read_text()[-2000:]}")
    return ends


def hung(process: subprocess.Popen[bytes], board: Board) -> bool:
    """Wait for the process to end; true if it made no progress for long."""
    seen, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        if board.tried() != seen:
            seen, since = board.tried(), time.monotonic()
        elif time.monotonic() - since > 3 * HUNG_S:
            return True
    return False


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def main(seconds: int) -> int:
    """Fuzz and print the figures; return the exit status."""
    guided = importlib.util.find_spec("atheris") is not None
    chosen = os.environ.get("FUZZ_DIR")
    folder = Path(chosen) if chosen else Path(tempfile.mkdtemp(prefix="zcache-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "board").unlink(missing_ok=True)
    say(f"fuzzing for {seconds} s, {'guided by coverage' if guided else 'by chance: atheris is not installed'}")
    begun = time.monotonic()
    ends = supervise(folder, seconds)
    counts = Board(folder / "board").read()
    say(
        f"mutations tried   {counts['damage'] + counts['forgeries']} in {time.monotonic() - begun:.0f} s",
        f"  damage          {counts['damage']}",
        f"  forgeries       {counts['forgeries']}, every checksum right",
        f"outcomes          {counts['right']} right bits, {counts['miss']} counted misses",
        f"                  {counts['other']} other items, all of them forgeries",
        f"entries healed    {counts['healed']}",
        f"crashes           {ends.crashes}",
        f"hangs             {ends.hangs}",
        f"wrong reads       {counts['wrong']}",
    )
    broken = bool(ends.crashes or ends.hangs or counts["wrong"])
    if broken:
        say(f"what led to it is in {folder}")
    elif not chosen:
        shutil.rmtree(folder)
    return int(broken)


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        reader = read_guided if importlib.util.find_spec("atheris") is not None else read_seeded
        reader(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else int(os.environ.get("FUZZ_S", "60"))))
