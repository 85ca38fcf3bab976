"""The ``zcache`` command: looks into a cache, checks it, clears it up."""
