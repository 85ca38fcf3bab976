"""Keys of cache entries: from an item, its source files and a pipeline to 32 hexadecimal digits.

The same in every process, under every hash seed and on every machine. What has no stable description raises
`FingerprintError`; nothing is ever hashed by name alone.
"""

from zcache.keys.describe import describe
from zcache.keys.fingerprint import fingerprint
from zcache.keys.items import entry_key, item_fingerprint, source_paths, source_stamps, stamp
from zcache.keys.values import Json, canonical_json, digest

__all__ = [
    "Json",
    "canonical_json",
    "describe",
    "digest",
    "entry_key",
    "fingerprint",
    "item_fingerprint",
    "source_paths",
    "source_stamps",
    "stamp",
]
