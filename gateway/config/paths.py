"""Paths that clients know, and paths that manage an engine. Configured routes are checked against both.

`gateway/request/routes.py` has the kind of each path.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class KnownPath(NamedTuple):
    """The treatment and the methods of one path."""

    treatment: str
    """Name of its route in `gateway/request/routes.py`."""
    methods: tuple[str, ...]


_PATHS: Final = {
    "chat POST": "/v1/chat/completions",
    "completions POST": "/v1/completions",
    "responses POST": "/v1/responses",
    "messages POST": "/v1/messages",
    "count_tokens POST": "/v1/messages/count_tokens",
    "audio POST": "/v1/audio/transcriptions /v1/audio/translations",
    "compute POST": "/v1/embeddings /v1/rerank /v2/rerank /rerank /v1/score /score /pooling /classify",
    "tokens POST": "/tokenize /detokenize",
    "pass POST": "/v1/responses/*/cancel",
    "read GET": "/v1/responses/*/input_items /version",
    "read GET DELETE": "/v1/responses/*",
    "stored GET POST": "/v1/files /v1/batches",
    "stored GET DELETE": "/v1/files/*",
    "stored GET": "/v1/files/*/content /v1/batches/*",
    "stored POST": "/v1/batches/*/cancel",
    "models GET": "/v1/models",
    "me GET": "/fairgate/me",
    "file GET": "/fairgate/me/page /fairgate/me/page/*",
    "health GET": "/ /health /ping",
}
"""Paths by treatment and methods. A star stands for one step. HEAD comes with GET."""
KNOWN_PATHS: Final = {
    path: KnownPath(treatment, tuple(methods))
    for words, paths in _PATHS.items()
    for treatment, *methods in [words.split()]
    for path in paths.split()
}

MANAGEMENT: Final = {
    "abort_request", "abort_requests", "attach_backend_load", "begin_weight_update",
    "clear_hicache_storage_backend", "close_session", "collective_rpc", "configure_logging",
    "continue_generation", "destroy_weights_update_group", "dump_expert_distribution_record", "flush_cache",
    "freeze_gc", "get_weights_by_name", "init_weight_transfer_engine", "init_weights_update_group", "is_paused",
    "is_scaling_elastic_ep", "is_sleeping", "load_lora_adapter", "load_lora_adapter_from_tensors", "open_session",
    "pause", "pause_generation", "release_memory_occupation", "reset_encoder_cache", "reset_mm_cache",
    "reset_prefix_cache", "resume", "resume_memory_occupation", "scale_elastic_ep", "server_info",
    "set_internal_state", "sleep", "slow_down", "start_profile", "stop_profile", "unload_lora_adapter",
    "update_weight_version", "update_weights", "update_weights_from_disk", "update_weights_from_distributed",
    "update_weights_from_tensor", "wake_up",
}  # fmt: skip
"""Steps of paths that manage an engine. No list has them, and no star in the config matches them."""
