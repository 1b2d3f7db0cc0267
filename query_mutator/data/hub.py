"""Question sets of the Hugging Face hub: `hf:NAME[:CONFIG][@SPLIT]` to data files in the hub's own cache.

The hub converts public sets to Parquet on the branch `refs/convert/parquet`, as CONFIG/SPLIT/0000.parquet; without
that branch, the data files of `main` are used. Cached files are used without a request to the hub, so that a resumed
run has the same questions.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from query_mutator.cli.console import note
from query_mutator.errors import DatasetError, hide_credentials, reason_of
from query_mutator.files import file_sha256

PREFIX = "hf:"
CONVERTED, MAIN = "refs/convert/parquet", "main"
_NAME = re.compile(r"hf:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^:@/]+))?(?:@(?P<split>[\w.-]+))?")
_DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
_SPLIT = re.compile(r"(?:.*[-_])?(train|validation|valid|val|dev|test)(?:[-_.]|\Z)")
_SHOWN = 20  # configurations in a message
_TIMEOUT_S = 30.0  # of the first request


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A name of the hub, with the configuration and split that were given."""

    name: str
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Return the parts of `hf:NAME[:CONFIG][@SPLIT]`."""
        found = _NAME.fullmatch(text)
        if found is None:
            raise DatasetError(f"{text[:200]}: not hf:NAME[:CONFIG][@SPLIT], as in hf:openai/gsm8k:main@train")
        return cls(**found.groupdict())

    def choose(self, files: Iterable[str]) -> tuple[str, str, list[str]]:
        """Return configuration, split and their files; DatasetError that lists what there is."""
        known: dict[str, dict[str, list[str]]] = {}
        for path in sorted(files):
            if (place := _place_of(path)) is not None:
                known.setdefault(place[0], {}).setdefault(place[1], []).append(path)
        if not known:
            raise DatasetError(f"hf:{self.name} has no Parquet, JSON or CSV files; download it and give its file")
        config = self._one("configuration", self.config, known, usual="default", mark=":")
        split = self._one("split", self.split, known[config], usual="train", mark="@")
        return config, split, known[config][split]

    def _one(self, what: str, given: str | None, known: Iterable[str], *, usual: str, mark: str) -> str:
        names = list(known)
        if given in names:
            return str(given)
        if given is None and (usual in names or len(names) == 1):
            return usual if usual in names else names[0]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        wrong = f"has no {what} {given!r}" if given is not None else f"has several {what}s"
        raise DatasetError(f"hf:{self.name} {wrong}: name one of {', '.join(names[:_SHOWN])}{more} after {mark!r}")


def fetch(text: str) -> tuple[list[Path], dict[str, Any]]:
    """Return the files of a set and where they are from, with commit and digests; DatasetError without them.

    A set in the cache is not looked up again.
    """
    wanted = HubName.parse(text)
    folder, revision, config, split, names = _in_cache(wanted) or _from_hub(wanted, text)
    paths = [folder / name for name in names]
    files = [{"path": name, "sha256": file_sha256(path)} for name, path in zip(names, paths, strict=True)]
    about = {"name": wanted.name, "config": config, "split": split, "revision": revision, "commit": folder.name}
    return paths, {**about, "files": files}


def _hub() -> Any:
    """Return the hub's client, which a plain install does without."""
    try:
        import huggingface_hub.errors
    except ModuleNotFoundError:
        raise DatasetError('hf: needs huggingface_hub; run `pip install "query-mutator[parquet]"`') from None
    return huggingface_hub


_Found = tuple[Path, str, str, str, list[str]]  # snapshot, revision, configuration, split, files in it


def _in_cache(wanted: HubName) -> _Found | None:
    """Return the files of the cache, None if not all are there."""
    try:
        for revision in (CONVERTED, MAIN):
            repository = hub_cache_folder() / f"datasets--{wanted.name.replace('/', '--')}"
            if not (repository / "refs" / revision).is_file():
                continue
            tree = _hub().get_cached_repo_tree(
                wanted.name, repo_type="dataset", revision=revision, cache_dir=hub_cache_folder()
            )
            config, split, names = wanted.choose(file.path for file in tree)
            return _snapshot(wanted, revision, names, local=True), revision, config, split, names
    except Exception:  # an older client, a partial download, another split: the hub is asked
        return None
    return None


def _from_hub(wanted: HubName, text: str) -> _Found:
    """Download the files; DatasetError that says what the hub said."""
    missing = _hub().errors.RevisionNotFoundError
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _unreachable(text, "HF_HUB_OFFLINE forbids a download")
    try:
        for revision in (CONVERTED, MAIN):
            try:
                about = (
                    _hub()
                    .HfApi(endpoint=_endpoint())
                    .dataset_info(  # which is not retried
                        wanted.name, revision=revision, files_metadata=True, timeout=_TIMEOUT_S
                    )
                )
                sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
            except missing:
                continue
            config, split, names = wanted.choose(sizes)
            note(f"{text}: {len(names)} files, {sum(sizes[name] for name in names) / 1e6:.1f} MB of {config}@{split}")
            return _snapshot(wanted, revision, names), revision, config, split, names
    except DatasetError:
        raise
    except Exception as error:  # the hub client raises a dozen types
        raise _explained(text, error) from error
    raise DatasetError(f"{text}: the hub has neither {CONVERTED} nor {MAIN} of it; download it and give its file")


def _snapshot(wanted: HubName, revision: str, names: Iterable[str], *, local: bool = False) -> Path:
    return Path(
        _hub().snapshot_download(
            wanted.name,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[glob.escape(name) for name in names],
            cache_dir=hub_cache_folder(),
            endpoint=_endpoint(),
            local_files_only=local,
        )
    )


def hub_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the hub's cache folder, from the hub client's own environment variables."""
    for variable, tail in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        if environ.get(variable):
            return Path(environ[variable]).expanduser() / tail
    return Path.home() / ".cache" / "huggingface" / "hub"


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _explained(text: str, error: Exception) -> DatasetError:
    """Return what to do about an error of the hub client."""
    errors = _hub().errors
    if isinstance(error, errors.GatedRepoError):
        return DatasetError(f"{text}: its owner grants access one by one; ask on its page, then run `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        return DatasetError(f"{text}: the hub has no such set (or it is private: run `hf auth login`); check the name")
    return _unreachable(text, reason_of(error))


def _unreachable(text: str, reason: str) -> DatasetError:
    hub = hide_credentials(_endpoint() or "https://huggingface.co")
    return DatasetError(
        f"{text} is not in the cache {hub_cache_folder()}, and {hub} gives none ({reason[:160]}); run it once "
        "online, or give a file"
    )


def _place_of(path: str) -> tuple[str, str] | None:
    """Return configuration and split of a data file by its path, None for another file."""
    if not path.lower().endswith(_DATA_SUFFIXES):
        return None
    *folders, name = path.split("/")
    if len(folders) == 2 and re.fullmatch(r"\d{4}\.parquet", name):  # a converted one
        return folders[0], folders[1]
    found = _SPLIT.match(name.lower())
    config = folders[0] if folders and folders[0] != "data" else "default"
    return (config, found[1] if found else "train") if found or name.count(".") == 1 else None
