"""Fields of administrative paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvfp4_sgl.serving.fields.checks import array_of, boolean, integer, one_of, plain, text
from nvfp4_sgl.serving.fields.field import Table, offered, refused
from nvfp4_sgl.serving.fields.generate import INTERNAL
from nvfp4_sgl.serving.fields.values import request_name

INT32 = 2**31 - 1
NO_DUMPS = "not offered: it writes requests to files; leave it out, and use log_requests"

NOT_HONOURED = "not honoured by an update of weights; leave it out"

NO_FIELDS: Table = {}

_MESSAGE: Table = {"rid": refused(INTERNAL), "http_worker_ipc": refused(INTERNAL)}
"""Fields of each message between SGLang's processes."""

ABORT_REQUEST: Table = {
    **_MESSAGE,
    "rid": offered(request_name()),
    "abort_all": offered(boolean(), null=False),
    "finished_reason": refused(INTERNAL),
    "abort_message": refused(INTERNAL),
    "weight_versions": refused(INTERNAL),
}


def abort_fault(body: Mapping[str, Any]) -> str | None:
    """Why a body of ``/abort_request`` aborts nothing, or ``None``."""
    return None if body.get("rid") or body.get("abort_all") else "rid: missing; expected it, or abort_all true"


CONFIGURE_LOGGING: Table = {
    **_MESSAGE,
    "log_requests": offered(boolean()),
    "log_requests_level": offered(integer(0, 3)),
    "log_requests_format": offered(one_of("text", "json")),
    "log_level": offered(one_of("debug", "info", "warning", "error", "critical")),
    "dump_requests_folder": refused(NO_DUMPS),
    "dump_requests_threshold": refused(NO_DUMPS),
    "dump_requests_exclude_meta_keys": refused(NO_DUMPS),
    "crash_dump_folder": refused(NO_DUMPS),
}

PAUSE_GENERATION: Table = {
    **_MESSAGE,
    "mode": offered(one_of("abort", "in_place", "retract"), null=False),
}

CONTINUE_GENERATION: Table = {
    **_MESSAGE,
    "torch_empty_cache": offered(boolean(), null=False),
}

UPDATE_WEIGHTS: Table = {
    **_MESSAGE,
    "model_path": offered(
        plain(
            "the path of a directory",
            lambda value: isinstance(value, str) and value != "" and "\0" not in value,
            inside=("DIR", "/a/b"),
            outside=("", "a\0b", 5, 0.5, True, [], ["DIR"], {}),
        ),
        required=True,
    ),
    "load_format": offered(one_of("auto", "safetensors")),
    "abort_all_requests": offered(boolean(), null=False),
    "weight_version": offered(text()),
    **{
        name: refused(NOT_HONOURED, harmless=one_of(value), null=False)
        for name, value in {
            "flush_cache": True,
            "is_async": False,
            "keep_pause": False,
            "recapture_cuda_graph": False,
            "token_step": 0,
            "torch_empty_cache": False,
        }.items()
    },
    "manifest": refused(NOT_HONOURED),
}
"""What is honoured :data:`..update_request.HONOURED` says, too, of callers without HTTP."""

START_PROFILE: Table = {
    **_MESSAGE,
    "req_type": refused(INTERNAL, null=False),
    "output_dir": offered(text(1)),
    "start_step": offered(integer(0, INT32)),
    "num_steps": offered(integer(1, INT32)),
    "activities": offered(array_of(one_of("CPU", "GPU", "MEM", "CUDA_PROFILER"), least=1)),
    "profile_by_stage": offered(boolean(), null=False),
    "with_stack": offered(boolean()),
    "record_shapes": offered(boolean()),
    "profile_id": offered(text(1)),
    "merge_profiles": offered(boolean(), null=False),
    "profile_prefix": offered(text(1)),
    "profile_stages": offered(array_of(text(1), least=1)),
    "detailed_annotations": offered(boolean(), null=False),
}
