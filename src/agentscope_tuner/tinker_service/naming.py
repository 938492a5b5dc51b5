"""What clients call checkpoints, and where these are; a run looks there without importing what computes."""

from __future__ import annotations

import re
from pathlib import Path

_SCHEME = "tinker://"
_NAME = re.compile(r"[\w.:\-]{1,200}")


class UserError(Exception):
    """The client asked for something that is wrong, or that this service does not do."""


def is_name(name: str) -> bool:
    """Whether this can be one part of a checkpoint's path, and a file's name."""
    return _NAME.fullmatch(name) is not None and not name.startswith(".")


def checkpoint_path(model_id: str, kind: str, name: str) -> str:
    """What clients call a checkpoint."""
    return f"{_SCHEME}{model_id}/{kind}/{name}"


def checkpoint_folder(root: Path, path: str) -> Path:
    """Where a service whose folder is `root` keeps the checkpoint that clients call `path`.

    Raises:
        UserError: this is no such name.
    """
    parts = path.removeprefix(_SCHEME).split("/")
    if not path.startswith(_SCHEME) or not all(is_name(part) for part in parts):
        raise UserError(f"checkpoints are named `{checkpoint_path('<model>', '<kind>', '<name>')}`, got `{path}`")
    return root.joinpath(*parts)
