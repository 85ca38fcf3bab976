"""What a function or module says that TorchScript compiled."""

from __future__ import annotations

import io
import re
import zipfile
from hashlib import blake2b
from typing import Any

from zcache.keys.values import Json

__all__ = ["script_form"]

_MANGLED = re.compile(rb"___torch_mangle_\d+")  # how many were compiled before it in this process
_LEFT_OUT = (".debug_pkl", ".data/serialization_id")  # where the source stood, and a number that each archive gets


def script_form(value: Any) -> Json:
    """Describe what `torch.jit.script` or `torch.jit.trace` returned: code, constants, parameters and buffers.

    Parameters
    ----------
    value : torch.jit.ScriptFunction or torch.jit.ScriptModule
        What was compiled.

    Returns
    -------
    Json
        The hashes of what its archive holds, less what says where its source stood.

    Examples
    --------
    >>> import torch, warnings
    >>> with warnings.catch_warnings(action="ignore"):  # newer versions advise to use something else
    ...     networks = [torch.jit.script(torch.nn.Linear(1, 1)) for _ in range(2)]
    >>> script_form(networks[0]) == script_form(networks[1])  # their weights are drawn at random
    False
    """
    with zipfile.ZipFile(io.BytesIO(value.save_to_buffer())) as archive:
        return [
            "script",
            [
                [name.partition("/")[2], blake2b(_MANGLED.sub(b"", archive.read(name)), digest_size=16).hexdigest()]
                for name in sorted(archive.namelist())
                if not name.endswith(_LEFT_OUT)
            ],
        ]
