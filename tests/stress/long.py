"""`make stress`: the long form of the stress tests, with figures at the end.

ZCACHE_STRESS_ROUNDS (400) rounds of killed processes, a tenth of them with DataLoaders, and a tenth as many over shared
memory; ZCACHE_STRESS_STARTS (200) DataLoader starts per method, ZCACHE_STRESS_SPAWNS (as many) by spawn, which takes
longest; ZCACHE_STRESS_EXAMPLES (300) runs of the state machine; ZCACHE_STRESS_SEED of the rounds. The first read that
is wrong, entry that is lost or process that hangs ends the run with its evidence and a status that is not 0.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter

from tests.stress.board import ROOT, run_driver

_WITH_MONAI = {"fork": 50, "forkserver": 50, "spawn": 10}  # of 100; spawned, each worker imports for four seconds
_DAY_S = 86_400


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def crashes(rounds: int, seed: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for module, share in (("crash", rounds - rounds // 10), ("loaders", rounds // 10), ("memory", rounds // 10)):
        figures = run_driver(f"tests.stress.{module}", [share, _DAY_S, seed], 120 + 10 * share)
        say(f"{module}: {figures}")
        total.update(figures)
    return total


def loader_starts(starts: dict[str, int]) -> dict[str, Counter[str]]:
    """Start workers by each method."""
    found = {}
    for method, total in starts.items():
        found[method] = Counter[str]()
        n_monai = total * _WITH_MONAI[method] // 100
        for kind, n in (("torch", total - n_monai), ("monai", n_monai)):
            figures = run_driver("tests.stress.starts", [method, kind, n, _DAY_S], 120 + 40 * n)
            say(f"{method}, {kind}: {figures}")
            found[method].update({f"with {kind}": n})
            found[method].update({name: figures.get(name, 0) for name in ("starts", "workers", "reads", "seconds")})
    return found


def main() -> int:
    """Run everything; return the exit status."""
    rounds = int(os.environ.get("ZCACHE_STRESS_ROUNDS", "400"))
    starts = int(os.environ.get("ZCACHE_STRESS_STARTS", "200"))
    spawns = int(os.environ.get("ZCACHE_STRESS_SPAWNS", str(starts)))
    examples = os.environ.get("ZCACHE_STRESS_EXAMPLES", "300")
    seed = int(os.environ.get("ZCACHE_STRESS_SEED", str(random.randrange(2**32))))
    begun = time.monotonic()
    say(f"seed {seed}")
    model = [sys.executable, "-m", "pytest", "-q", "--timeout=3600", "tests/stress/test_model.py"]
    environment = {**os.environ, "ZCACHE_STRESS_EXAMPLES": examples}
    if subprocess.run(model, cwd=ROOT, env=environment, check=False, timeout=_DAY_S).returncode:
        return 1
    killed = crashes(rounds, seed)
    started = loader_starts({"fork": starts, "forkserver": starts, "spawn": spawns})
    say(
        f"""
state machine            {examples} runs
rounds                   {killed["rounds"]}
kills                    {killed["kills"]}
entries written          {killed["entries written"]}
bytes flipped            {killed["flips"]}
reads verified           {killed["reads"] + killed["regions"] + sum(c["reads"] for c in started.values())}
voxels picked, verified  {killed["picks"]}
wrong                    0
lost                     0
staging of the killed    {killed["staging left by the killed"]}, all swept
DataLoader starts        {killed["starts"]} in rounds with kills"""
    )
    for method, counts in started.items():
        kinds = f"{counts['with torch']} over zcache.Cache, {counts['with monai']} PersistentDataset"
        say(f"  {method:<23}{counts['starts']} ({kinds}), {counts['workers']} workers, {counts['seconds']} s")
    say(f"hangs                    0\nseconds                  {time.monotonic() - begun:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
