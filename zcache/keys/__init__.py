"""Keys of cache entries: from an item, its source files and a pipeline to 32 hexadecimal digits.

The same in every process, under every hash seed and on every machine. What has no stable description raises
`FingerprintError`; nothing is ever hashed by name alone.
"""

from zcache.keys.describe import describe
from zcache.keys.files import stamp
from zcache.keys.fingerprint import Fingerprint, fingerprint, trace
from zcache.keys.ingredients import Difference, Nearest, differences, entry_key, ingredients, nearest, pack, unpack
from zcache.keys.items import item_fingerprint, source_paths, source_stamps
from zcache.keys.modules import version
from zcache.keys.switches import switches
from zcache.keys.values import Json, canonical_json, digest

__all__ = [
    "Difference",
    "Fingerprint",
    "Json",
    "Nearest",
    "canonical_json",
    "describe",
    "differences",
    "digest",
    "entry_key",
    "fingerprint",
    "ingredients",
    "item_fingerprint",
    "nearest",
    "pack",
    "source_paths",
    "source_stamps",
    "stamp",
    "switches",
    "trace",
    "unpack",
    "version",
]
