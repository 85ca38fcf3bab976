"""Commands that show one entry elsewhere: as a picture, as a NIfTI file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zcache.cli.options import CacheOption, KeyArgument
from zcache.cli.output import friendly, opened, say
from zcache.errors import CacheConfigError
from zcache.inspection.windows import PRESETS, parse_window

__all__ = ["export", "show_entry"]

_PICTURES = frozenset({".png", ".jpg", ".jpeg", ".pdf", ".svg", ".webp"})


@friendly
def show_entry(
    key: KeyArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="KEY.png if left out.")] = None,
    *,
    cache: CacheOption = None,
    image: Annotated[str | None, typer.Option(help="Which array.")] = None,
    label: Annotated[str | None, typer.Option(help="Which array to draw over it.")] = None,
    no_label: Annotated[bool, typer.Option("--no-label", help="Draw no label.")] = False,
    channel: Annotated[int, typer.Option(help="Which channel or point in time.")] = 0,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="LOW,HIGH|NAME",
            help=f"What is black and white; of CT in Hounsfield units also {', '.join(PRESETS)}. "
            "The 1st and 99th percentile if left out.",
        ),
    ] = None,
    mosaic: Annotated[bool, typer.Option("--mosaic", help="Up to 24 slices of one view.")] = False,
) -> None:
    """Draw an entry into a picture: the middle slices, or many of one view; the histogram; the classes of the label."""
    entry = opened(cache).resolve(key)
    path = Path(f"{entry.key[:12]}.png") if output is None else output
    if path.suffix.lower() not in _PICTURES:
        raise CacheConfigError(f"{path} should end in one of {', '.join(sorted(_PICTURES))}")
    figure = entry.plot(
        image,
        False if no_label else label,
        channel=channel,
        window=None if window is None else parse_window(window),
        layout="mosaic" if mosaic else "planes",
    )
    figure.savefig(path)
    say(str(path))


@friendly
def export(
    key: KeyArgument,
    output: Annotated[Path, typer.Argument(help="Ends in .nii.gz or .nii.")],
    *,
    cache: CacheOption = None,
    array: Annotated[str | None, typer.Option(help="Which array; the image if left out.")] = None,
) -> None:
    """Write an array of an entry as NIfTI."""
    say(str(opened(cache).resolve(key).to_nifti(output, array)))
