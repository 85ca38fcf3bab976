"""What is missing skips a test, but never in continuous integration."""

from __future__ import annotations

import shutil
import subprocess
from types import SimpleNamespace

import pytest

from tests.viewers import tools


@pytest.fixture(params=[("true", pytest.fail.Exception), ("", pytest.skip.Exception)], ids=["in CI", "elsewhere"])
def outcome(request, monkeypatch):
    value, raised = request.param
    monkeypatch.setenv("CI", value)
    tools.node.cache_clear()
    yield raised
    tools.node.cache_clear()


def test_no_program(outcome, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(outcome, match="Node"):
        tools.node()
    with pytest.raises(outcome, match="chromium"):
        tools.browser()


def test_no_packages(outcome, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="v22.1.0\n"))
    monkeypatch.setattr(tools, "FOLDER", tmp_path)
    with pytest.raises(outcome, match="make viewers"):
        tools.node()


def test_an_old_node(outcome, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="v18.20.4\n"))
    with pytest.raises(outcome, match=r"v18\.20\.4, too old"):
        tools.node()
