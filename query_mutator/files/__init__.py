"""Files, and the folder of a run: part of the base, so that every room and both toolkits may use it.

`whole` writes and reads files in one piece; `json_lines` has files of rows with checksums; `lock` guards a folder that
a process writes; `run_dir` creates the folder of a run, writes config, transcripts and summary, and says whether a run
is running, finished, interrupted or killed; `metrics` reads `metrics.tsv`, the list of every metric key, and writes
`metrics.jsonl`.
"""

from query_mutator.errors import disk_advice, disk_errors
from query_mutator.files.whole import (
    LOCK,
    atomic_folder,
    atomic_write,
    count_values,
    decode,
    decode_object,
    encode,
    file_sha256,
    finite,
    parse_json,
    parse_json_object,
    read_checked_json,
    sync_folder,
    user_cache_folder,
    verified,
    write_checked_json,
    write_json,
    write_text,
)

__all__ = [
    "LOCK", "atomic_folder", "atomic_write", "count_values", "decode", "decode_object", "disk_advice", "disk_errors",
    "encode", "file_sha256", "finite", "parse_json", "parse_json_object", "read_checked_json", "sync_folder",
    "user_cache_folder", "verified", "write_checked_json", "write_json", "write_text",
]  # fmt: skip
