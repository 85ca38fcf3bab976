"""Pure encoding: values in, bytes and JSON out; no I/O, no threads, no torch."""
