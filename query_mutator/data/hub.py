"""Question sets of the Hugging Face hub: `hf:NAME[:CONFIG][@SPLIT]` to Parquet files in the hub's own cache.

The hub converts public sets to Parquet on the branch `refs/convert/parquet`, as CONFIG/SPLIT/0000.parquet. Cached files
are used without a request to the hub, so that a resumed run has the same questions.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from query_mutator.cli.console import note
from query_mutator.errors import DatasetError, hide_credentials, reason_of
from query_mutator.files import file_sha256

PREFIX = "hf:"
CONVERTED = "refs/convert/parquet"
_NAME = re.compile(r"hf:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^:@/]+))?(?:@(?P<split>[\w.-]+))?")
_FILE = re.compile(r"([^/]+)/([^/]+)/\d{4}\.parquet")
_SHOWN = 20  # configurations in a message


def fetch(text: str) -> tuple[list[Path], dict[str, Any]]:
    """Return the files of a set and where they are from, with commit and digests; DatasetError without them."""
    found = _NAME.fullmatch(text)
    if found is None:
        raise DatasetError(f"{text[:200]}: not hf:NAME[:CONFIG][@SPLIT], as in hf:openai/gsm8k:main@train")
    try:
        import huggingface_hub as hub
    except ModuleNotFoundError:
        raise DatasetError('hf: needs huggingface_hub; run `pip install "query-mutator[parquet]"`') from None
    name, *wanted = found.groups()
    source: dict[str, Any] = {"repo_id": name, "repo_type": "dataset", "revision": CONVERTED}

    for local in (True, False):  # in the cache are nothing, a partial download, or other splits: then the hub is asked
        try:
            tree = (
                [file.path for file in hub.get_cached_repo_tree(**source)] if local else hub.list_repo_files(**source)
            )
            config, split, names = choose(text, tree, *wanted)
            if not local:
                note(f"{text}: {len(names)} files of {config}@{split}")
            patterns = [*map(glob.escape, names)]
            folder = Path(hub.snapshot_download(**source, allow_patterns=patterns, local_files_only=local))
            paths = [folder / name for name in names]
            files = [{"path": name, "sha256": file_sha256(path)} for name, path in zip(names, paths, strict=True)]
            break
        except DatasetError:
            if not local:
                raise
        except Exception as error:  # the hub client raises a dozen types
            if not local:
                raise DatasetError(f"{text}: {_advice(hub, error)}") from error
    about = {"name": name, "config": config, "split": split, "revision": CONVERTED, "commit": folder.name}
    return paths, {**about, "files": files}


def choose(text: str, files: Iterable[str], config: str | None, split: str | None) -> tuple[str, str, list[str]]:
    """Return configuration, split and their files; DatasetError that lists what there is."""
    known: dict[str, dict[str, list[str]]] = {}
    for path in sorted(files):
        if (found := _FILE.fullmatch(path)) is not None:
            known.setdefault(found[1], {}).setdefault(found[2], []).append(path)
    config = _one(text, "configuration", config, known, usual="default", mark=":")
    split = _one(text, "split", split, known[config], usual="train", mark="@")
    return config, split, known[config][split]


def _one(text: str, what: str, given: str | None, known: Iterable[str], *, usual: str, mark: str) -> str:
    names = list(known)
    if given in names:
        return str(given)
    if given is None and (usual in names or len(names) == 1):
        return usual if usual in names else names[0]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    wrong = f"has no {what} {given!r}" if given is not None else f"has several {what}s"
    raise DatasetError(f"{text} {wrong}: name one of {', '.join(names[:_SHOWN])}{more} after {mark!r}")


def _advice(hub: Any, error: Exception) -> str:
    """Return what to do about an error of the hub client."""
    errors = hub.errors
    if isinstance(error, errors.GatedRepoError):
        return "its owner grants access one by one; ask on its page, then run `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no {CONVERTED} of it; download it (`hf download --repo-type dataset`) and give its file"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such set (or it is private: run `hf auth login`); check the name"
    endpoint, cache = hide_credentials(hub.constants.ENDPOINT), hub.constants.HF_HUB_CACHE
    reason = reason_of(error)[:160]
    return f"it is not in the cache {cache}, and {endpoint} gives none ({reason}); run it once online, or give a file"
