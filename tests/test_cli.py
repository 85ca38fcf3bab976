"""The zcache command: what it prints, how it ends, how long it takes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner

import zcache
from tests.inspection.caches import fill, item, three_entries
from tests.support import REPOSITORY, files_under, key, same_bits
from zcache.cli.app import app
from zcache.cli.output import default_cache_dir
from zcache.keys import source_stamps
from zcache.storage import files

MANY = 10_000


@pytest.fixture
def cache_dir(tmp_path) -> Path:
    return three_entries(tmp_path / "cache")


def run(*args, code=0, **kwargs):
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "300"}, **kwargs)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def printed(*args, **kwargs):
    return json.loads(run(*args, "--json", **kwargs).stdout)


def test_ls(cache_dir):
    lines = run("ls", cache_dir).stdout.splitlines()
    assert lines[0].split() == ["key", "age", "raw", "stored", "ratio", "by", "arrays", "source"]
    assert [line.split()[0] for line in lines[1:4]] == [key(1)[:12], key(2)[:12], "f" * 12]
    assert lines[3].endswith("label 1×40×44×48 uint8  patient_003/ct.nii.gz, seg.nii.gz")
    assert lines[4].startswith("3 entries, 1.3 MB in ")
    assert run("ls", "-C", cache_dir, "--find", "patient_002").stdout.count("\n") == 3
    assert "1 entry" in run("ls", cache_dir, "--transform", "pixdim=[3.0").stdout
    assert "0 entries" in run("ls", cache_dir, "--before", "1d").stdout
    assert "(of 3)" in run("ls", cache_dir, "--limit", 1).stdout
    for order in ("source", "age", "size", "ratio", "key"):
        assert "3 entries" in run("ls", cache_dir, "--sort", order).stdout


def test_on_a_terminal(cache_dir, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    for command in ("ls", "info", "stats"):
        assert "\x1b[" in run(command, cache_dir, color=True).stdout
    assert "\x1b[" in run("info", "ff", "-C", cache_dir, color=True).stdout


def test_ls_as_json(cache_dir):
    found = printed("ls", cache_dir)
    assert [e["key"] for e in found["entries"]] == [key(1), key(2), "f" * 32]
    assert [e["pipeline"] for e in found["entries"]] == ["A", "A", "B"]
    assert found["pipelines"]["A"][1]["transform"] == "Spacingd"
    assert found["entries"][0]["arrays"][0]["shape"] == [1, 40, 44, 48]


def test_info(cache_dir):
    text = run("info", cache_dir).stdout
    assert "entries   3 ok" in text
    assert "pipeline B, 1 entry\n  ~ Spacingd: pixdim=[1.0, 1.0, 2.0] → [3.0, 3.0, 3.0]" in text
    assert printed("info", cache_dir)["differences"] == {"B": ["~ Spacingd: pixdim=[1.0, 1.0, 2.0] → [3.0, 3.0, 3.0]"]}
    one = run("info", "patient_002", "-C", cache_dir).stdout
    assert "value     id = P002" in one
    assert "step 2    Spacingd(keys=['image', 'label'], pixdim=[1.0, 1.0, 2.0])" in one
    assert printed("info", "ff", "-C", cache_dir)["values"] == {"id": "P003", "age": "43"}


def test_the_cache_of_the_environment(cache_dir, monkeypatch):
    from zcache.training.dataset import default_cache_dir as of_datasets  # noqa: PLC0415

    assert default_cache_dir() == of_datasets()
    monkeypatch.setenv("ZCACHE_DIR", str(cache_dir))
    assert default_cache_dir() == of_datasets() == cache_dir
    assert "3 entries" in run("ls").stdout


def test_stats(cache_dir):
    text = run("stats", cache_dir).stdout
    assert "float32→int16" in text
    assert "less than a day ago" in text
    found = printed("stats", cache_dir)
    assert found["ages"] == [{"age": "less than a day ago", "entries": 3, "stored_bytes": found["stored_bytes"]}]
    assert len(found["largest"]) == 3


def test_verify_and_repair(cache_dir):
    assert run("verify", cache_dir).stdout.endswith("read: all sound\n")
    shard = cache_dir / "cache.zarr" / key(1) / "image/c/0/0/0/0"
    data = bytearray(shard.read_bytes())
    data[50] ^= 1
    shard.write_bytes(data)
    (cache_dir / "cache.zarr" / "notes.txt").write_text("")
    other = {"zarr_format": 3, "node_type": "group", "attributes": {"zcache": {"format": 2}}}
    (cache_dir / "cache.zarr" / key(2) / "zarr.json").write_text(json.dumps(other))
    text = run("verify", cache_dir, code=1).stdout
    assert "damaged         image" in text
    assert "unknown format  -      it has format 2; this zcache reads format 1" in text
    assert "foreign: notes.txt is no entry" in text
    found = printed("verify", cache_dir, code=1)
    assert [(f["key"], f["status"]) for f in found["findings"]] == [(key(1), "damaged"), (key(2), "unknown format")]
    assert f"removed {key(1)}" in run("verify", cache_dir, "--repair").stdout
    assert run("verify", cache_dir).exit_code == 0
    assert not shard.exists()


def test_diff(cache_dir):
    assert "arrays: the same" in run("diff", "ff", "ff", "-C", cache_dir).stdout
    text = run("diff", key(1), "ff", "-C", cache_dir, code=1).stdout
    assert "~ Spacingd: pixdim=[1.0, 1.0, 2.0] → [3.0, 3.0, 3.0]" in text
    assert printed("diff", key(1), "ff", "-C", cache_dir, code=1)["values"] == ["~ id: P001 → P003", "~ age: 41 → 43"]


def test_show_and_export(cache_dir, tmp_path, monkeypatch):
    run("show", "ff", "-C", cache_dir, "-o", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    assert run("show", "patient_001", "-C", cache_dir, "--no-label").stdout == f"{key(1)[:12]}.png\n"
    small = (tmp_path / "out.png").stat().st_size
    run("show", "ff", "-C", cache_dir, "-o", tmp_path / "many.png", "--mosaic", "--window", "-100,700")
    assert (tmp_path / "many.png").stat().st_size > small
    run("export", "ff", tmp_path / "out.nii.gz", "-C", cache_dir, "--array", "label")
    assert same_bits(np.asarray(nib.load(tmp_path / "out.nii.gz").dataobj), item(3)["label"][0])


def test_prune(cache_dir):
    before = files_under(cache_dir)
    text = run("prune", cache_dir, "--max-size", "1KiB", "--dry-run").stdout
    assert "would remove 3 of 3 entries" in text
    assert "not read for longest" in text
    refused = run("prune", cache_dir, "--max-size", "1KiB", code=2).stderr
    assert "nothing was removed: there is nobody to ask; add --yes" in refused
    assert files_under(cache_dir) == before
    assert "removed 0 of 3" in run("prune", cache_dir, "--older-than", "1d").stdout
    shard = cache_dir / "cache.zarr" / key(1) / "image/c/0/0/0/0"
    os.utime(shard, (time.time() + 9999, shard.stat().st_mtime))
    found = printed("prune", cache_dir, "--max-size", "200KiB", "--yes")
    assert [r["key"] for r in found["removed"]] in ([key(2), "f" * 32], ["f" * 32, key(2)])
    assert list(zcache.open_cache(cache_dir)) == [key(1)]
    assert list((cache_dir / "staging").iterdir()) == []
    run("prune", cache_dir, "--older-than", "0s", "-y")
    assert len(zcache.open_cache(cache_dir)) == 0
    assert "0 entries" in run("ls", cache_dir).stdout


def stamped(folder: Path) -> Path:
    """Two entries whose sources are known; that of the second is another by now."""
    data = folder / "data"
    data.mkdir()
    paths = [data / f"{i}.nii" for i in (1, 2)]
    for path in paths:
        path.write_bytes(b"scan")

    def described(i):
        return {"source": [str(paths[i - 1])], "sources": source_stamps([str(paths[i - 1])])}

    fill(folder / "cache", {key(i): item(i) for i in (1, 2)}, described)
    fill(folder / "cache", {key(3): {"n": 3}}, lambda _: {"sources": [{"path": "3.nii", "size": 1, "mtime_ns": 1}]})
    paths[1].write_bytes(b"another scan")
    return folder / "cache"


def test_stale_entries_are_listed_and_removed(tmp_path):
    cache = stamped(tmp_path)
    changed = f"{tmp_path / 'data' / '2.nii'} was changed"
    text = run("verify", cache).stdout  # they are sound
    assert text.startswith(f"stale: {key(2)[:12]} {changed}\n1 entry stale; zcache prune --stale removes what is\n")
    assert "sources of 1 entry cannot be compared: 3.nii is out of reach; --root says where the data lie now" in text
    assert text.endswith("read: all sound\n")
    found = printed("verify", cache)
    assert found["stale"] == [{"key": key(2), "reasons": [changed]}]
    assert found["sources"] == {"fresh": 1, "stale": 1, "unknown": 1}
    (tmp_path / "data" / "3.nii").write_bytes(b"3")
    assert printed("verify", cache, "--root", tmp_path / "data")["sources"] == {"fresh": 1, "stale": 2}
    before = files_under(cache)
    text = run("prune", cache, "--stale", "--dry-run").stdout
    assert f"{changed}  data/2.nii\nwould remove 1 of 3 entries" in text
    assert files_under(cache) == before
    assert [r["reason"] for r in printed("prune", cache, "--stale", "-y")["removed"]] == [changed]
    assert list(zcache.open_cache(cache)) == [key(1), key(3)]
    assert "removed 0 of 2" in run("prune", cache, "--stale", "-y").stdout


def completed(*words, **env) -> list[str]:
    """What bash would be offered after some words; the last one is being typed."""
    asked = {
        "_ZCACHE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(map(str, words)),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = CliRunner().invoke(app, [], prog_name="zcache", env={**asked, **env})
    return done.stdout.split()


def test_commands_options_and_keys_are_completed(cache_dir):
    assert completed("zcache", "s") == ["stats", "show"]
    assert completed("zcache", "show", "--mos") == ["--mosaic"]
    keys = [key(1)[:12], key(2)[:12], "f" * 12]
    assert sorted(set(completed("zcache", "info", "-C", cache_dir, ""))) == sorted(set(keys))
    assert completed("zcache", "show", "-C", cache_dir, "ff") == ["f" * 12]
    assert completed("zcache", "export", "-C", cache_dir, "f" * 13) == ["f" * 32]
    assert completed("zcache", "diff", "f" * 12, "f", ZCACHE_DIR=str(cache_dir)) == ["f" * 12]
    assert completed("zcache", "info", "-C", cache_dir / "nowhere", "") == []


def test_zsh_is_told_what_a_key_is(cache_dir):
    env = {"_ZCACHE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": f"zcache info -C {cache_dir} f"}
    assert "patient_003/ct.nii.gz, seg.nii.gz" in CliRunner().invoke(app, [], prog_name="zcache", env=env).stdout


def test_completion_of_many_keys_reads_no_entry(many, monkeypatch):
    monkeypatch.setattr("zcache.inspection.entry.survey", None)
    assert len(completed("zcache", "info", "-C", many, "000")) == MANY


def test_help_tells_of_completion_and_demo():
    text = " ".join(run("--help").stdout.split())
    assert "--install-completion lets the shell complete commands, options and keys" in text
    assert "zcache demo shows it all" in text


def test_mistakes_get_a_sentence(cache_dir, tmp_path):
    for args, message in [
        (("ls", tmp_path / "cahce"), "did you mean"),
        (("ls", tmp_path), "it has no cache.zarr; did you mean"),
        (("info", "fffe", "-C", cache_dir), "did you mean ffffffffffff (patient_003/ct.nii.gz, seg.nii.gz)?"),
        (("info", "000", "-C", cache_dir), "'000' means 2 entries"),
        (("ls", cache_dir, "--sort", "colour"), "--sort colour is none of source, age, size, ratio, key"),
        (("ls", cache_dir, "--since", "soon"), "neither an age such as 30d"),
        (("prune", cache_dir), "say what can go: --stale, --older-than, --unused-since or --max-size"),
        (("prune", cache_dir, "--max-size", "much"), "not a number of bytes"),
        (("show", "ff", "-C", cache_dir, "-o", "x.doc"), "x.doc should end in one of"),
        (("show", "ff", "-C", cache_dir, "--window", "liver"), "the window 'liver' is neither LOW,HIGH such as"),
        (("show", "ff", "-C", cache_dir, "--window", "lung", "--image", "label"), "is one of CT in Hounsfield units"),
        (("verify", cache_dir, "--root", tmp_path / "no"), "is not a folder"),
        (("show", "ff", "-C", cache_dir, "--image", "ct"), "no image 'ct': it has 'image', 'label'"),
        (("show", "ff", "-C", cache_dir, "-o", tmp_path / "no" / "x.png"), "No such file or directory"),
        (("export", "ff", "x.mha", "-C", cache_dir), "should end in .nii.gz or .nii"),
        (("ls", cache_dir, "--nonsense"), "No such option"),
    ]:
        result = run(*args, code=2)
        assert message in " ".join(result.stderr.replace("│", " ").split()), result.stderr
        assert result.stdout == ""


def test_help_tells_the_exit_codes():
    text = " ".join(run("--help").stdout.split())
    assert "130 interrupted" in text
    assert run("--version").stdout.strip() == zcache.__version__


def test_demo_shows_it_all_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run("demo", color=True)
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    commands = [line.split()[2] for line in text.splitlines() if line.startswith("$ zcache ")]
    assert commands == ["ls", "info", "show", "verify"]
    assert "patient_001/ct.nii.gz" in text
    assert "pipeline B, 2 entries" in text
    assert "▀" * 20 in text
    assert "all sound" in text
    assert "stale" not in text
    assert "zcache demo --keep zcache-demo" in text
    assert list(tmp_path.iterdir()) == []


def test_demo_that_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    folder = tmp_path / "new" / "demo"
    text = run("demo", "--keep", folder).stdout
    assert "▀" not in text
    view = zcache.open_cache(folder / "cache")
    assert len(view) == 6
    assert [n for _, n in view.summary().pipelines] == [4, 2]
    assert len(list(folder.glob("*.png"))) == 1
    next_ones = [line.split()[1:] for line in text.partition("Try next:")[2].splitlines() if line.strip()]
    assert len(next_ones) == 5
    monkeypatch.chdir(tmp_path)
    for arguments in next_ones:
        run(*arguments)
    assert f"{folder} is not an empty folder" in run("demo", "--keep", folder, code=2).stderr
    assert len(zcache.open_cache(folder / "cache")) == 6


@pytest.mark.parametrize("keep", [False, True])
def test_demo_that_fails_leaves_nothing(tmp_path, monkeypatch, keep):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr("zcache.cli.demo._EXAMPLE", "zcache.no_such_module")
    result = run("demo", *(["--keep", tmp_path / "demo"] if keep else []), code=2)
    assert "the example could not be made" in result.stderr
    assert "no_such_module" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [False, True])
def test_demo_and_control_c(tmp_path, keep):
    path = tmp_path / "run.py"
    path.write_text(
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from zcache.cli.app import app\napp()\n"
    )
    folder = tmp_path / "tmp"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(path), "demo", *(["--keep", str(folder / "demo")] if keep else [])],
        env={**ENV, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(folder.rglob("patient_001")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (output, errors.strip()) == ("", "zcache: interrupted")
    assert list(folder.iterdir()) == []


def script(tmp_path: Path, *args: object) -> list[str]:
    path = tmp_path / "zcache_command.py"
    path.write_text("from zcache.cli.app import app\napp()\n")
    return [sys.executable, str(path), *map(str, args)]


ENV = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def test_control_c_ends_without_a_traceback(tmp_path):
    folder = fill(tmp_path / "cache", {key(i): item(i) for i in range(3)})
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # jobs in the background ignore it
        "import zcache.cli.upkeep as app\n"
        "real = app.verify\n"
        "def slow(*args):\n"
        "    for verdict in real(*args):\n"
        "        yield verdict\n"
        "        print('checked', flush=True)\n"
        "        time.sleep(30)\n"
        "app.verify = slow\n"
        "from zcache.cli.app import app\n"
        "app()\n"
    )
    path = tmp_path / "slow.py"
    path.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(path), "verify", str(folder)],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "checked\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.strip() == "zcache: interrupted"


def test_a_pipe_that_is_closed(cache_dir, tmp_path):
    process = subprocess.Popen(
        script(tmp_path, "ls", cache_dir, "--json"), env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=30)


@pytest.mark.parametrize("package", ["nibabel", "matplotlib"])
def test_demo_without_its_extra(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    error = run("demo", code=2).stderr
    assert error == f"zcache: {package} is not installed, which this needs: pip install 'monai-zcache[inspect]'\n"


def test_drawing_without_its_extra(cache_dir, monkeypatch):
    for package in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, package, None)
    for room in ("plot", "panels"):
        monkeypatch.delitem(sys.modules, f"zcache.inspection.{room}", raising=False)
    with pytest.raises(zcache.MissingExtraError, match=r"matplotlib is not installed, .* pip install"):
        zcache.open_cache(cache_dir)[key(1)].plot()


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Ten thousand entries: the document of one, again and again, without the arrays that no list looks into."""
    folder = fill(tmp_path_factory.mktemp("many") / "cache", {key(0): item(0)})
    root = folder / "cache.zarr"
    template = root / key(0)
    document = (template / "zarr.json").read_bytes()
    for i in range(1, MANY):
        target = root / key(i)
        target.mkdir()
        (target / "zarr.json").write_bytes(document)
    yield folder
    shutil.rmtree(folder)


def test_ten_thousand_entries_are_listed_by_one_small_read_each(many, monkeypatch):
    opened = []
    real = files.read_below
    monkeypatch.setattr(files, "read_below", lambda *args: opened.append(args[1]) or real(*args))
    text = run("ls", many).stdout
    assert text.count("\n") == MANY + 2
    assert "10,000 entries, 4.2 GB in 1.3 GB" in text
    assert len(opened) <= MANY + 1
    view = zcache.open_cache(many)
    assert len(view.find("nobody")) == 0
    assert "and 9,980 more" in repr(view)
