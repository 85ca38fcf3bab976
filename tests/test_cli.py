"""The zcache command: what it prints, how it ends, how long it takes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner

import zcache
import zcache.cli
from tests.inspection.caches import fill, item, three_entries
from tests.support import REPOSITORY, files_under, key, same_bits
from zcache.cli.app import app
from zcache.cli.output import default_cache_dir
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
    assert lines[3].endswith("image 1×40×44×48 float32→int16, label 1×40×44×48 uint8  ct.nii.gz, seg.nii.gz")
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


def test_mistakes_get_a_sentence(cache_dir, tmp_path):
    for args, message in [
        (("ls", tmp_path / "cahce"), "did you mean"),
        (("ls", tmp_path), "it has no cache.zarr; did you mean"),
        (("info", "fffe", "-C", cache_dir), "did you mean ffffffffffff (ct.nii.gz, seg.nii.gz)?"),
        (("info", "000", "-C", cache_dir), "'000' means 2 entries"),
        (("ls", cache_dir, "--sort", "colour"), "--sort colour is none of source, age, size, ratio, key"),
        (("ls", cache_dir, "--since", "soon"), "neither an age such as 30d"),
        (("prune", cache_dir), "say what can go: --older-than, --unused-since or --max-size"),
        (("prune", cache_dir, "--max-size", "much"), "not a number of bytes"),
        (("show", "ff", "-C", cache_dir, "-o", "x.doc"), "x.doc should end in one of"),
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


def script(tmp_path: Path, *args: object) -> list[str]:
    path = tmp_path / "zcache_command.py"
    path.write_text("from zcache.cli import main\nmain()\n")
    return [sys.executable, str(path), *map(str, args)]


ENV = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def test_control_c_ends_without_a_traceback(tmp_path):
    folder = fill(tmp_path / "cache", {key(i): item(i) for i in range(3)})
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # jobs in the background ignore it
        "import zcache.cli.app as app\n"
        "real = app.verify\n"
        "def slow(*args):\n"
        "    for verdict in real(*args):\n"
        "        yield verdict\n"
        "        print('checked', flush=True)\n"
        "        time.sleep(30)\n"
        "app.verify = slow\n"
        "from zcache.cli import main\n"
        "main()\n"
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


def test_without_its_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "zcache.cli.app")
    monkeypatch.delitem(sys.modules, "zcache.cli.output", raising=False)
    with pytest.raises(SystemExit) as ended:
        zcache.cli.main()
    assert ended.value.code == 2
    assert "pip install 'zcache[inspect]'" in capsys.readouterr().err


def test_drawing_without_its_extra(cache_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "zcache.inspection.plot", raising=False)
    with pytest.raises(zcache.MissingExtraError, match=r"matplotlib is not installed, .* pip install"):
        zcache.open_cache(cache_dir)[key(1)].plot()


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Ten thousand entries: copies of one, the shards by hard links."""
    folder = fill(tmp_path_factory.mktemp("many") / "cache", {key(0): item(0)})
    root = folder / "cache.zarr"
    template = root / key(0)
    document = (template / "zarr.json").read_bytes()
    for i in range(1, MANY):
        target = root / key(i)
        target.mkdir()
        (target / "zarr.json").write_bytes(document)
        for name in ("image", "label"):
            (target / name).symlink_to(template / name)  # no list looks into it
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
