"""Prometheus metrics of our model, beside SGLang's, on a server with ``--enable-metrics``; without it nothing runs.

All of them are made of what the host knows: configuration, SGLang's own counts of pools, and the lengths of requests.
Throughput, latencies, tokens from the prefix cache and the rest are SGLang's (``sglang:...``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvfp4_sgl.cache.layout import PAGE_TOKENS, STATE_RING, Rings
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.serving import runtime_info
from nvfp4_sgl.serving.rings import rings
from nvfp4_sgl.serving.sglang import hooking, request_state, scheduling

ABOUT = ("version", "target", "activation_mode", "dtype", "kv_rows", "routing")
"""Entries of :func:`nvfp4_sgl.serving.runtime_info.describe_runtime` that are labels of ``nvfp4_sgl_info``."""

STATES = ("capacity", "used", "cached")
"""What is said of each pool; the rest is free."""


class Metrics:
    """The metrics of one scheduler.

    Args:
        config: the served model.
        info: what :func:`nvfp4_sgl.serving.runtime_info.describe_runtime` says.
        labels: SGLang's labels of this scheduler's metrics.
        pools: asks how full the pools are (:func:`nvfp4_sgl.serving.sglang.scheduling.pool_occupancy`).
    """

    def __init__(
        self,
        config: ModelConfig,
        info: Mapping[str, Any],
        labels: Mapping[str, Any],
        pools: Callable[[], Mapping[str, Mapping[str, int]]],
    ):
        from prometheus_client import Counter, Gauge  # reads at import where SGLang's processes share their values

        self._config, self._pools = config, pools

        def gauge(name: str, what: str, *more: str) -> Any:
            return Gauge(f"nvfp4_sgl_{name}", what, [*labels, *more], multiprocess_mode="mostrecent")

        about = gauge("info", "1; its labels say what runs.", *ABOUT)
        about.labels(**labels, **{name: info[name] for name in ABOUT}).set(1)
        boundary = gauge("boundary", "1 for each boundary of the decoder and its implementation.", "boundary", "op")
        for name, implementation in info["boundaries"].items():
            boundary.labels(**labels, boundary=name, op=implementation).set(1)
        rows = {state: gauge(f"pool_{state}", f"Rows of each pool: {state}.", "kind") for state in STATES}
        self._rows = {
            (kind, state): rows[state].labels(**labels, kind=kind)
            for kind in occupancy(config, pools())
            for state in STATES
        }
        self._queries = Counter("nvfp4_sgl_decode_queries", "Tokens that decode passes have run.", [*labels])
        self._queries = self._queries.labels(**labels)
        self._entries = {}
        for what, help in (
            ("available", "Compressed entries that the queries of decode passes could choose from, in one layer."),
            ("chosen", "Compressed entries that the queries of decode passes have read, in one layer."),
        ):
            counter = Counter(f"nvfp4_sgl_entries_{what}", help, [*labels, "kind"])
            for kind in compressed_kinds(config):
                self._entries[kind, what] = counter.labels(**labels, kind=kind.name.lower())
        self.set_pools()

    def set_pools(self) -> None:
        """Set the gauges of the pools."""
        for kind, counts in occupancy(self._config, self._pools(), rings()).items():
            for state in STATES:
                self._rows[kind, state].set(counts[state])

    def count_decode(self, lengths: Sequence[int]) -> None:
        """Count a decode pass over queries that see ``lengths`` tokens, themselves included."""
        self._queries.inc(len(lengths))
        for kind in compressed_kinds(self._config):
            available, chosen = entries(self._config, kind, lengths)
            self._entries[kind, "available"].inc(available)
            self._entries[kind, "chosen"].inc(chosen)


def compressed_kinds(config: ModelConfig) -> list[LayerKind]:
    """Kinds of the model's layers that read compressed entries."""
    return [kind for kind in (LayerKind.CSA, LayerKind.HCA) if kind in config.layer_kinds]


def entries(config: ModelConfig, kind: LayerKind, lengths: Sequence[int]) -> tuple[int, int]:
    """Numbers of entries that the last tokens of sequences see in a layer of ``kind``, and that they read.

    CSA reads the ``index_topk`` that its indexer scores highest, HCA all (specification §3).
    """
    seen = [length // kind.value for length in lengths]
    if kind is LayerKind.CSA:
        return sum(seen), sum(min(count, config.index_topk) for count in seen)
    return sum(seen), sum(seen)


def occupancy(
    config: ModelConfig, pools: Mapping[str, Mapping[str, int]], rings: Rings = STATE_RING
) -> dict[str, dict[str, int]]:
    """Rows by kind and state of everything that SGLang's ``pools`` of tokens and request slots stand for.

    Entries are pages of the full pool, CSA's pending rows belong to pages of the window's pool, and HCA's to requests
    (:mod:`nvfp4_sgl.cache.layout`).
    """
    rows = {name: dict(counts) for name, counts in pools.items()}

    def scaled(kind: str, source: str, times: int, over: int = 1) -> None:
        if source in pools:
            rows[kind] = {state: pools[source][state] * times // over for state in STATES}

    kinds = compressed_kinds(config)
    if LayerKind.CSA in kinds:
        scaled("csa_entries", "full", 1, LayerKind.CSA.value)
        scaled("csa_index_keys", "full", 1, LayerKind.CSA.value)
        scaled("csa_states", "swa", rings[LayerKind.CSA.value], PAGE_TOKENS)
    if LayerKind.HCA in kinds:
        scaled("hca_entries", "full", 1, LayerKind.HCA.value)
        scaled("hca_states", "requests", rings[LayerKind.HCA.value])
    return rows


def watch(scheduler: Any) -> None:
    """Publish metrics of SGLang's ``scheduler`` from now on, if it publishes its own."""
    labels = scheduling.metric_labels(scheduler)
    if labels is None:
        return
    model_runner = scheduler.tp_worker.model_runner
    info = runtime_info.describe_runtime(model_runner)
    assert info is not None, "no metrics are made for other models"
    config = model_runner.model.model_config
    metrics = Metrics(config, info, labels, lambda: scheduling.pool_occupancy(scheduler))

    def decode_result(original: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
        metrics.count_decode(request_state.decoding_lengths(batch, result))
        original(processor, batch, result)

    def publish_metrics(original: Callable[..., None], collector: Any, stats: Any) -> None:
        original(collector, stats)
        metrics.set_pools()

    hooking.install_hooks({"decode_result": decode_result, "publish_metrics": publish_metrics})
