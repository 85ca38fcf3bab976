"""``python -m zcache``: the ``zcache`` command."""

from zcache.cli.app import app

if __name__ == "__main__":
    app()
